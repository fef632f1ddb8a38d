#include "backend_plan.h"

#include <algorithm>
#include <cstring>
#include <set>
#include <string>
#include <tuple>
#include <utility>

namespace decode_dispatch {
namespace {

// 2^16 batches cost 256 KiB at most, and no engine captures a larger batch; above, a binary search answers.
constexpr std::int64_t kIndexedBatches = 65536;
constexpr std::uint32_t kEntryTag = 1u << 31;  // in Group::child: the rest is an entry, not a group
constexpr std::uint32_t kNoBoxes = 0;          // the group of a bucket without entries
// No query has this low bound, because lookup() answers negative lengths before it searches.
constexpr std::uint64_t kUnreachable = 1ull << 63;
// A group splits its boxes into four even parts, so 2^31 entries are at most 16 groups deep, and each visit
// of a group takes one slot of the stack and adds at most four.
constexpr std::size_t kStack = 16 * 3 + 4;

// A byte that is not ASCII and a line end, so that a transfer in text mode shows at once.
constexpr char kMagic[] = {'\x89', 'D', 'D', 'P', 'L', 'A', 'N', '\n'};
constexpr std::size_t kMagicBytes = sizeof(kMagic);
constexpr std::uint32_t kVersion = 1;
constexpr std::size_t kLengthAt = kMagicBytes + 4;
constexpr std::size_t kHeaderBytes = kLengthAt + 8 + 3 * 4;  // magic, version, total length, three counts
constexpr std::size_t kChecksumBytes = 8;
constexpr std::size_t kEntryBytes = 5 * 8 + 2 * 4;  // the least that an entry takes: two empty texts

// No streams in this file: they look up locale facets by a number that two copies of the C++ library in one
// process give out twice. Where a toolchain links the library statically, as some do, and torch has loaded the
// shared one, printing a number to a stream then crashes; seen with GCC 13 on a GPU node.
std::string part(const std::string& text) { return text; }
std::string part(const char* text) { return text; }
template <class Number>
std::string part(Number number) {
  return std::to_string(number);
}

template <class... Part>
[[noreturn]] void fail(const Part&... parts) {
  throw PlanError((std::string() + ... + part(parts)));
}

// Names end up in log lines, file names and Python strings, and must survive all of them.
bool printable(const std::string& text) {
  return std::all_of(text.begin(), text.end(), [](unsigned char c) { return c >= 0x20 && c < 0x7f; });
}

auto canonical_key(const PlanEntry& e) { return std::tie(e.bucket, e.mean_kv_min, e.skew_min); }

bool canonical_order(const PlanEntry& a, const PlanEntry& b) { return canonical_key(a) < canonical_key(b); }

std::string box_text(const PlanEntry& e) {
  return "mean KV " + part(e.mean_kv_min) + ".." + part(e.mean_kv_max) + ", skew " + part(e.skew_min) + ".." +
         part(e.skew_max);
}

// FNV-1a finds every change of one byte: for a given state both of its steps (xor with a byte, multiplication
// by an odd number modulo 2^64) are one-to-one, so two states that differ once stay different to the end.
std::uint64_t fnv1a(const char* data, std::size_t size) {
  std::uint64_t hash = 0xcbf29ce484222325ull;
  for (const char* end = data + size; data != end; ++data) {
    hash = (hash ^ static_cast<unsigned char>(*data)) * 0x100000001b3ull;
  }
  return hash;
}

void put(std::string& out, std::uint64_t value, std::size_t bytes) {
  for (std::size_t i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i)));
}

void put(std::string& out, const std::string& text) {
  put(out, text.size(), 4);
  out += text;
}

class Reader {
 public:
  Reader(const char* data, std::size_t size) : next_(data), end_(data + size) {}

  std::size_t left() const { return static_cast<std::size_t>(end_ - next_); }

  std::uint64_t number(std::size_t bytes) {
    const char* from = take(bytes);
    std::uint64_t value = 0;
    for (std::size_t i = bytes; i-- > 0;) value = value << 8 | static_cast<unsigned char>(from[i]);
    return value;
  }

  std::int64_t signed64() { return static_cast<std::int64_t>(number(8)); }

  std::string text() {
    const std::size_t size = number(4);
    return std::string(take(size), size);
  }

 private:
  const char* take(std::size_t bytes) {
    if (bytes > left()) fail("corrupt: a field of ", bytes, " bytes where ", left(), " are left");
    return std::exchange(next_, next_ + bytes);
  }

  const char* next_;
  const char* end_;
};

// A count is believed only if the bytes that are left could hold so many items; it sizes an allocation.
std::size_t believable(std::uint64_t count, std::size_t item_bytes, std::size_t left, const char* what) {
  if (count > left / item_bytes) fail("corrupt: ", count, " ", what, " in ", left, " bytes");
  return count;
}

void check_envelope(const char* data, std::size_t size) {
  if (size != 0 && std::memcmp(data, kMagic, std::min(size, kMagicBytes)) != 0) fail("not a plan: magic");
  if (size < kHeaderBytes + kChecksumBytes) {
    fail("truncated: ", size, " bytes, the header alone takes ", kHeaderBytes + kChecksumBytes);
  }
  const std::uint64_t version = Reader(data + kMagicBytes, 4).number(4);
  if (version != kVersion) fail("plan format ", version, ", this build reads ", kVersion);
  const std::uint64_t total = Reader(data + kLengthAt, 8).number(8);
  if (size != total) {
    fail(size < total ? "truncated: " : "trailing bytes: ", size, " bytes, the header says ", total);
  }
  const std::size_t covered = size - kChecksumBytes;
  const std::uint64_t checksum = Reader(data + covered, kChecksumBytes).number(kChecksumBytes);
  if (checksum != fnv1a(data, covered)) fail("corrupt: checksum");
}

}  // namespace

bool operator==(const PlanEntry& a, const PlanEntry& b) {
  return canonical_key(a) == canonical_key(b) && a.mean_kv_max == b.mean_kv_max &&
         a.skew_max == b.skew_max && a.backend == b.backend && a.tactic == b.tactic;
}

BackendPlan::BackendPlan(std::vector<std::int64_t> buckets, std::vector<std::string> names)
    : buckets_(std::move(buckets)), names_(std::move(names)) {
  std::int64_t below = 0;
  for (const std::int64_t bucket : buckets_) {
    if (bucket <= 0) fail("bucket ", bucket, ": a bucket must be positive");
    if (bucket <= below) fail("bucket ", bucket, " after ", below, ": buckets must be strictly ascending");
    below = bucket;
  }
  std::set<std::string> seen;
  for (const std::string& name : names_) {
    if (name.empty() || !printable(name)) fail("a backend name must be printable ASCII and not empty");
    if (!seen.insert(name).second) fail("backend '", name, "' is listed twice");
  }
}

void BackendPlan::set(PlanEntry entry) {
  check(entry);
  const auto at = std::upper_bound(entries_.begin(), entries_.end(), entry, canonical_order);
  entries_.insert(at, std::move(entry));
}

void BackendPlan::check(const PlanEntry& entry) const {
  if (frozen_) fail("the plan is frozen");
  if (!std::binary_search(buckets_.begin(), buckets_.end(), entry.bucket)) {
    fail("bucket ", entry.bucket, " is not one of the plan's buckets");
  }
  if (!printable(entry.backend + entry.tactic)) fail("backend and tactic must be printable ASCII");
  if (std::find(names_.begin(), names_.end(), entry.backend) == names_.end()) {
    std::string listed;
    for (const std::string& name : names_) listed += (listed.empty() ? "" : ", ") + name;
    fail("backend '", entry.backend, "' is not one of the plan's names: ", listed);
  }
  if (entry.mean_kv_min < 0 || entry.skew_min < 0) fail("negative bounds: ", box_text(entry));
  if (entry.mean_kv_min > entry.mean_kv_max || entry.skew_min > entry.skew_max) {
    fail("unordered bounds: ", box_text(entry));
  }
  PlanEntry start;
  start.bucket = entry.bucket;
  auto other = std::lower_bound(entries_.begin(), entries_.end(), start, canonical_order);
  for (; other != entries_.end() && other->bucket == entry.bucket; ++other) {
    if (other->mean_kv_min > entry.mean_kv_max) break;  // and so does every later box of this bucket
    if (other->mean_kv_max >= entry.mean_kv_min && other->skew_min <= entry.skew_max &&
        other->skew_max >= entry.skew_min) {
      fail("bucket ", entry.bucket, ": ", box_text(entry), " overlaps ", box_text(*other));
    }
  }
}

struct BackendPlan::Item {
  std::array<std::int64_t, 2> low, high;  // mean KV, skew
  std::uint32_t child;

  // Makes `middle` the place where [first, last) is cut, in the dimension in which fewer boxes reach across
  // the cut: a point near a cut that no box crosses lies on one side only, and its search never turns back.
  static void cut(Item* first, Item* middle, Item* last) {
    const auto partition = [&](std::size_t dim) {
      const auto below = [dim](const Item& a, const Item& b) { return a.low[dim] < b.low[dim]; };
      std::nth_element(first, middle, last, below);
      const auto crosses = [&](const Item& item) { return item.high[dim] >= middle->low[dim]; };
      return std::count_if(first, middle, crosses);
    };
    const auto mean_crossings = partition(0);
    if (mean_crossings <= partition(1)) partition(0);
  }

  static Item around(const Item* first, const Item* last, std::uint32_t child) {
    Item box{first->low, first->high, child};
    for (; first != last; ++first) {
      for (std::size_t dim = 0; dim < 2; ++dim) {
        box.low[dim] = std::min(box.low[dim], first->low[dim]);
        box.high[dim] = std::max(box.high[dim], first->high[dim]);
      }
    }
    return box;
  }
};

// Appends the tree over [first, last), which it reorders, and returns its root.
std::uint32_t BackendPlan::grow(std::vector<Group>& groups, Item* first, Item* last) {
  const auto root = static_cast<std::uint32_t>(groups.size());
  groups.emplace_back();
  groups[root].mean_low.fill(kUnreachable);
  const auto count = static_cast<std::size_t>(last - first);
  const bool leaf = count <= kWidth;
  std::array<Item*, kWidth + 1> part{};
  for (std::size_t i = 0; i <= kWidth; ++i) {
    part[i] = first + (leaf ? std::min(i, count) : count * i / kWidth);
  }
  if (!leaf) {
    Item::cut(first, part[2], last);
    Item::cut(first, part[1], part[2]);
    Item::cut(part[2], part[3], last);
  }
  for (std::size_t i = 0; i < kWidth; ++i) {
    if (part[i] == part[i + 1]) continue;
    const bool single = part[i + 1] - part[i] == 1;
    const std::uint32_t child = single ? part[i]->child : grow(groups, part[i], part[i + 1]);
    const Item box = Item::around(part[i], part[i + 1], child);
    Group& group = groups[root];  // only now: grow() may have moved the groups
    group.mean_low[i] = static_cast<std::uint64_t>(box.low[0]);
    group.mean_span[i] = static_cast<std::uint64_t>(box.high[0] - box.low[0]);
    group.skew_low[i] = static_cast<std::uint64_t>(box.low[1]);
    group.skew_span[i] = static_cast<std::uint64_t>(box.high[1] - box.low[1]);
    group.child[i] = box.child;
  }
  return root;
}

void BackendPlan::freeze() {
  if (frozen_) return;
  const std::int64_t indexed = buckets_.empty() ? 0 : std::min(buckets_.back(), kIndexedBatches);
  std::vector<std::uint32_t> bucket_of_batch(static_cast<std::size_t>(indexed) + 1);
  std::uint32_t bucket = 0;
  for (std::size_t batch = 1; batch < bucket_of_batch.size(); ++batch) {
    if (static_cast<std::int64_t>(batch) > buckets_[bucket]) ++bucket;
    bucket_of_batch[batch] = bucket;
  }

  std::vector<Item> items;
  items.reserve(entries_.size());
  for (const PlanEntry& e : entries_) {
    const auto index = static_cast<std::uint32_t>(items.size());
    items.push_back({{e.mean_kv_min, e.skew_min}, {e.mean_kv_max, e.skew_max}, index | kEntryTag});
  }
  std::vector<Group> groups;
  grow(groups, nullptr, nullptr);  // kNoBoxes
  // One more than there are buckets: the last is for batches above all of them.
  std::vector<std::uint32_t> roots(buckets_.size() + 1, kNoBoxes);
  std::size_t first = 0;
  for (std::size_t i = 0; i < buckets_.size(); ++i) {
    std::size_t last = first;
    while (last < entries_.size() && entries_[last].bucket == buckets_[i]) ++last;
    if (first < last) roots[i] = grow(groups, items.data() + first, items.data() + last);
    first = last;
  }

  bucket_of_batch_ = std::move(bucket_of_batch);
  roots_ = std::move(roots);
  groups_ = std::move(groups);
  frozen_ = true;
}

const PlanEntry* BackendPlan::lookup(std::int64_t batch_size, std::int64_t mean_kv,
                                     std::int64_t skew) const {
  if (!frozen_) fail("lookup() before freeze()");
  if (batch_size <= 0 || mean_kv < 0 || skew < 0) return nullptr;
  const auto batch = static_cast<std::size_t>(batch_size);
  std::size_t bucket;
  if (batch < bucket_of_batch_.size()) {
    bucket = bucket_of_batch_[batch];
  } else {
    const auto holds = std::lower_bound(buckets_.begin(), buckets_.end(), batch_size);
    bucket = static_cast<std::size_t>(holds - buckets_.begin());
  }
  const auto mean = static_cast<std::uint64_t>(mean_kv);
  const auto second = static_cast<std::uint64_t>(skew);

  std::uint32_t at = roots_[bucket];
  std::uint32_t stack[kStack];
  std::size_t top = 0;
  while (!(at & kEntryTag)) {
    const Group& group = groups_[at];
    // Every child is written and only a hit keeps its place: which box holds a point cannot be predicted, and
    // a mispredicted branch costs more than the four stores.
    const auto visit = [&](std::size_t i) {
      stack[top] = group.child[i];
      top += static_cast<std::size_t>((mean - group.mean_low[i] <= group.mean_span[i]) &
                                      (second - group.skew_low[i] <= group.skew_span[i]));
    };
    static_assert(kWidth == 4, "one visit each; -O2 leaves a loop rolled, which costs a fifth more");
    visit(0);
    visit(1);
    visit(2);
    visit(3);
    if (top == 0) return nullptr;
    at = stack[--top];
  }
  return &entries_[at & ~kEntryTag];
}

std::string BackendPlan::to_bytes() const {
  std::string out(kMagic, kMagicBytes);
  put(out, kVersion, 4);
  put(out, 0, 8);  // the total length, once it is known
  put(out, buckets_.size(), 4);
  put(out, names_.size(), 4);
  put(out, entries_.size(), 4);
  for (const std::int64_t bucket : buckets_) put(out, static_cast<std::uint64_t>(bucket), 8);
  for (const std::string& name : names_) put(out, name);
  for (const PlanEntry& e : entries_) {
    for (const std::int64_t field : {e.bucket, e.mean_kv_min, e.mean_kv_max, e.skew_min, e.skew_max}) {
      put(out, static_cast<std::uint64_t>(field), 8);
    }
    put(out, e.backend);  // by name: the position in a list of names means nothing to another build
    put(out, e.tactic);
  }
  std::string total;
  put(total, out.size() + kChecksumBytes, 8);
  out.replace(kLengthAt, total.size(), total);
  put(out, fnv1a(out.data(), out.size()), kChecksumBytes);
  return out;
}

BackendPlan BackendPlan::from_bytes(const void* data, std::size_t size) {
  const auto* bytes = static_cast<const char*>(data);
  check_envelope(bytes, size);
  // The checksum vouches for the transport, not for the writer: everything is checked again.
  Reader in(bytes + kLengthAt + 8, size - kLengthAt - 8 - kChecksumBytes);
  const std::uint64_t bucket_count = in.number(4);
  const std::uint64_t name_count = in.number(4);
  const std::uint64_t entry_count = in.number(4);

  std::vector<std::int64_t> buckets(believable(bucket_count, 8, in.left(), "buckets"));
  for (std::int64_t& bucket : buckets) bucket = in.signed64();
  std::vector<std::string> names;
  names.reserve(believable(name_count, 4 + 1, in.left(), "names"));
  for (std::uint64_t i = 0; i < name_count; ++i) names.push_back(in.text());

  BackendPlan plan(std::move(buckets), std::move(names));
  plan.entries_.reserve(believable(entry_count, kEntryBytes, in.left(), "entries"));
  for (std::uint64_t i = 0; i < entry_count; ++i) {
    PlanEntry e;
    for (std::int64_t* field : {&e.bucket, &e.mean_kv_min, &e.mean_kv_max, &e.skew_min, &e.skew_max}) {
      *field = in.signed64();
    }
    e.backend = in.text();
    e.tactic = in.text();
    plan.set(std::move(e));
  }
  if (in.left() != 0) fail("corrupt: ", in.left(), " bytes after the last entry");
  plan.freeze();
  return plan;
}

std::string BackendPlan::digest() const {
  const std::string bytes = to_bytes();
  constexpr char kHex[] = "0123456789abcdef";
  std::string text;
  for (std::size_t i = 1; i <= kChecksumBytes; ++i) {  // the checksum at the end, which is little-endian
    const auto byte = static_cast<unsigned char>(bytes[bytes.size() - i]);
    text += {kHex[byte >> 4], kHex[byte & 15]};
  }
  return text;
}

}  // namespace decode_dispatch
