// The page of the attention kernels, from an engine's block size. The one copy of this rule: Python calls it
// too. Plain C++17, with nothing to compile along.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

namespace decode_dispatch {

// The largest of 128, 64, 32 and 16 tokens that divides `block_size`, for an engine to derive once, at start.
// Throws std::invalid_argument, in one line that names the block size, for one that is not a multiple of 16
// above 0. Not PlanError: an engine can go on without a plan, but not with such a block size.
inline std::int64_t kernel_page_size(std::int64_t block_size) {
  if (block_size > 0) {
    for (const std::int64_t page_size : {128, 64, 32, 16}) {
      if (block_size % page_size == 0) return page_size;
    }
  }
  // no streams, for the reason in backend_plan.cc
  throw std::invalid_argument("block size " + std::to_string(block_size) +
                              ": must be a multiple of 16 above 0, since a page of the kernels holds 128, 64, "
                              "32 or 16 tokens");
}

}  // namespace decode_dispatch
