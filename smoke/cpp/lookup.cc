// How a C++ engine without Python asks a plan.
//
//     I=$(python -c "import dispatch; print(dispatch.get_include())")
//     g++ -std=c++17 -O2 -I$I smoke/cpp/lookup.cc $I/backend_plan.cc -o lookup
//     ./lookup plan.bin 8 4096 16384
//
// prints the backend and its tactic, or "default" where the plan has no entry and the engine does as before.
#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>

#include "backend_plan.h"

namespace {

std::string read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) throw std::runtime_error("cannot read the file");
  return bytes;
}

std::int64_t number(const std::string& text) {
  std::size_t used = 0;
  std::int64_t value = 0;
  try {
    value = std::stoll(text, &used);
  } catch (const std::logic_error&) {  // not a number, or one that does not fit
  }
  if (used == 0 || used != text.size()) throw std::runtime_error("'" + text + "' is not an integer");
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: lookup PLAN_FILE BATCH_SIZE MEAN_KV MAX_KV\n";
    return 2;
  }
  try {
    const std::string bytes = read_file(argv[1]);
    // At start, once. From here on any thread may look up, without a lock.
    const auto plan = decode_dispatch::BackendPlan::from_bytes(bytes.data(), bytes.size());
    // In each step: live rows, ceil(sum of lengths / rows), longest length.
    const auto* entry = plan.lookup(number(argv[2]), number(argv[3]), number(argv[4]));
    if (entry == nullptr) {
      std::cout << "default\n";
    } else {
      std::cout << entry->backend << (entry->tactic.empty() ? "" : " ") << entry->tactic << "\n";
    }
  } catch (const std::exception& error) {
    std::cerr << "lookup: " << argv[1] << ": " << error.what() << "\n";
    return 2;
  }
}
