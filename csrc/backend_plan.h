// The decision of a tuning run: a frozen table from (batch, mean KV, skew) to the backend that serves the step.
// Plain C++17 for engines without Python: compile backend_plan.cc along with your own sources.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace decode_dispatch {

// A broken contract. Whatever threw it left the plan as it was.
class PlanError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// One box of a bucket. All four bounds are inclusive: of the mean KV length in tokens, and of the skew. `tactic`
// is text such as "num_splits=4".
struct PlanEntry {
  std::int64_t bucket = 0;
  std::int64_t mean_kv_min = 0;
  std::int64_t mean_kv_max = 0;
  std::int64_t skew_min = 0;
  std::int64_t skew_max = 0;
  std::string backend;
  std::string tactic;
};

bool operator==(const PlanEntry& a, const PlanEntry& b);

// What a plan is asked for a step: its live rows, their mean KV length in tokens, rounded up, and the skew: the
// longest over that mean, in thousandths, rounded down; 1000 where all are alike. `max_kv` is the longest.
struct Batch {
  std::int64_t batch_size = 0;
  std::int64_t mean_kv = 0;
  std::int64_t skew = 0;
  std::int64_t max_kv = 0;
};

// Of the KV lengths of a step's live rows, the new token included; above 0. No rows: all 0, which is in no plan.
inline Batch batch_of(const std::int32_t* lengths, std::size_t rows) {
  Batch batch;
  std::int64_t sum = 0;
  for (std::size_t i = 0; i < rows; ++i) {
    sum += lengths[i];
    if (lengths[i] > batch.max_kv) batch.max_kv = lengths[i];
  }
  batch.batch_size = static_cast<std::int64_t>(rows);
  if (sum > 0) {
    batch.mean_kv = (sum + batch.batch_size - 1) / batch.batch_size;
    batch.skew = batch.max_kv * 1000 / batch.mean_kv;
  }
  return batch;
}

// Filled by one thread with set(), then frozen. A frozen plan never changes again, so any number of threads
// may read it without a lock.
class BackendPlan {
 public:
  // `buckets`: captured batch sizes, positive and strictly ascending. `names`: the backends that entries may
  // name, unique, not empty, printable ASCII. Throws PlanError otherwise.
  BackendPlan(std::vector<std::int64_t> buckets, std::vector<std::string> names);

  // Throws PlanError on a frozen plan, for a bucket or a backend that the plan does not list, for a tactic
  // that is not printable ASCII, for negative or unordered bounds, and for a box that overlaps another of its
  // bucket.
  void set(PlanEntry entry);

  // Builds the index that lookup() reads. Freezing twice is harmless.
  void freeze();

  // The entry for a step, as batch_of() describes it: of the smallest bucket that holds the batch, the box around
  // (mean_kv, skew). nullptr is a miss: use the default. The entry lives as long as the plan. Allocates nothing.
  // Throws PlanError before freeze().
  const PlanEntry* lookup(std::int64_t batch_size, std::int64_t mean_kv, std::int64_t skew) const;

  // In order of bucket, mean_kv_min, skew_min, whatever the order of the set() calls.
  const std::vector<PlanEntry>& entries() const { return entries_; }
  const std::vector<std::int64_t>& buckets() const { return buckets_; }
  const std::vector<std::string>& names() const { return names_; }
  bool frozen() const { return frozen_; }

  // The same bytes on every machine for the same content. from_bytes() returns a frozen plan, and throws
  // PlanError for bytes that are truncated, extended, corrupt, of another format, or that describe a plan
  // which set() refuses.
  std::string to_bytes() const;
  static BackendPlan from_bytes(const void* data, std::size_t size);

  // 16 hex digits over the content: equal for equal plans, for ranks and stores to compare. Not
  // cryptographic.
  std::string digest() const;

 private:
  // A bucket's usual three boxes then fit one group; 6 and 8 measured slower there, and no faster elsewhere.
  static constexpr std::size_t kWidth = 4;

  // A node of the search tree: up to kWidth boxes, each a subtree's bounding box or an entry's own. Stored as
  // (low, high - low), so that one unsigned comparison a dimension tests both bounds.
  struct Group {
    std::array<std::uint64_t, kWidth> mean_low, mean_span, skew_low, skew_span;
    std::array<std::uint32_t, kWidth> child;
  };
  struct Item;

  void check(const PlanEntry& entry) const;
  static std::uint32_t grow(std::vector<Group>& groups, Item* first, Item* last);

  std::vector<std::int64_t> buckets_;
  std::vector<std::string> names_;
  std::vector<PlanEntry> entries_;
  bool frozen_ = false;
  std::vector<std::uint32_t> bucket_of_batch_;  // for batches small enough to index; others are searched
  std::vector<std::uint32_t> roots_;            // of each bucket, the group to start at
  std::vector<Group> groups_;
};

}  // namespace decode_dispatch
