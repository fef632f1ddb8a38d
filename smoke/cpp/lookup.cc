// How a C++ engine without Python asks a plan.
//
//     I=$(python -c "import dispatch; print(dispatch.get_include())")
//     g++ -std=c++17 -O2 -I$I smoke/cpp/lookup.cc $I/backend_plan.cc -o lookup
//     ./lookup plan.bin 900 1800 4096 16384
//
// takes the KV lengths of a batch, and prints the backend and its tactic, or "default" where the plan has no entry and the engine does as before.
#include <cstdint>
#include <exception>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend_plan.h"

namespace {

std::string read_file(const char* path) {
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) throw std::runtime_error("cannot read the file");
  return bytes;
}

std::int32_t number(const std::string& text) {
  std::size_t used = 0;
  std::int32_t value = 0;
  try {
    value = std::stoi(text, &used);
  } catch (const std::logic_error&) {  // not a number, or one that does not fit
  }
  if (used == 0 || used != text.size()) throw std::runtime_error("'" + text + "' is not an integer");
  return value;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: lookup PLAN_FILE LENGTH...\n";
    return 2;
  }
  try {
    const std::string bytes = read_file(argv[1]);
    // At start, once. From here on any thread may look up, without a lock.
    const auto plan = decode_dispatch::BackendPlan::from_bytes(bytes.data(), bytes.size());
    // In each step: the lengths of its live rows, the new token included.
    std::vector<std::int32_t> lengths;
    for (int i = 2; i < argc; ++i) lengths.push_back(number(argv[i]));
    const auto batch = decode_dispatch::batch_of(lengths.data(), lengths.size());
    const auto* entry = plan.lookup(batch.batch_size, batch.mean_kv, batch.skew);
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
