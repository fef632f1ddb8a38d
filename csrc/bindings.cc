// dispatch._core: the table of backend_plan.h and the rule of page_size.h, for Python.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "backend_plan.h"
#include "page_size.h"

namespace py = pybind11;

namespace {

using decode_dispatch::BackendPlan;
using decode_dispatch::PlanEntry;
using decode_dispatch::PlanError;

// The table with one Python object an entry, made when the table is frozen: a lookup then costs a reference
// count in place of a new object with two strings.
struct BoundPlan {
  explicit BoundPlan(BackendPlan filled) : table(std::move(filled)) {
    if (table.frozen()) keep_objects();
  }

  void keep_objects() {
    std::vector<py::object> made;
    made.reserve(table.entries().size());
    for (const PlanEntry& entry : table.entries()) made.push_back(py::cast(entry));
    objects = std::move(made);
  }

  BackendPlan table;
  std::vector<py::object> objects;
};

py::tuple fields(const PlanEntry& e) {
  return py::make_tuple(e.bucket, e.mean_kv_min, e.mean_kv_max, e.skew_min, e.skew_max, e.backend,
                        e.tactic);
}

PlanEntry make_entry(std::int64_t bucket, std::int64_t mean_kv_min, std::int64_t mean_kv_max,
                     std::int64_t skew_min, std::int64_t skew_max, std::string backend,
                     std::string tactic) {
  return {bucket, mean_kv_min, mean_kv_max, skew_min, skew_max, std::move(backend), std::move(tactic)};
}

PlanEntry entry_from_fields(const py::tuple& state) {
  if (state.size() != 7) throw PlanError("a PlanEntry has 7 fields");
  const auto number = [&](std::size_t i) { return state[i].cast<std::int64_t>(); };
  return make_entry(number(0), number(1), number(2), number(3), number(4), state[5].cast<std::string>(),
                    state[6].cast<std::string>());
}

std::string entry_repr(const PlanEntry& e) {
  return py::
      str("PlanEntry(bucket={}, mean_kv_min={}, mean_kv_max={}, skew_min={}, skew_max={}, backend={!r}, "
          "tactic={!r})")
          .format(*fields(e));
}

BoundPlan make_plan(std::vector<std::int64_t> buckets, std::vector<std::string> names) {
  return BoundPlan(BackendPlan(std::move(buckets), std::move(names)));
}

void set(BoundPlan& plan, std::int64_t bucket, std::int64_t mean_kv_min, std::int64_t mean_kv_max,
         std::int64_t skew_min, std::int64_t skew_max, std::string backend, std::string tactic) {
  plan.table.set(make_entry(bucket, mean_kv_min, mean_kv_max, skew_min, skew_max, std::move(backend),
                            std::move(tactic)));
}

void freeze(BoundPlan& plan) {
  if (plan.table.frozen()) return;
  plan.keep_objects();
  plan.table.freeze();
}

py::object lookup(const BoundPlan& plan, std::int64_t batch_size, std::int64_t mean_kv, std::int64_t skew) {
  const PlanEntry* entry = plan.table.lookup(batch_size, mean_kv, skew);
  if (entry == nullptr) return py::none();
  return plan.objects[static_cast<std::size_t>(entry - plan.table.entries().data())];
}

py::bytes to_bytes(const BoundPlan& plan) { return py::bytes(plan.table.to_bytes()); }

BoundPlan from_bytes(const py::bytes& data) {
  const std::string_view view = data;
  return BoundPlan(BackendPlan::from_bytes(view.data(), view.size()));
}

py::bytes get_state(const BoundPlan& plan) {
  if (!plan.table.frozen()) throw PlanError("only a frozen plan can be pickled");
  return to_bytes(plan);
}

std::string plan_repr(const BoundPlan& plan) {
  return "<BackendPlan: " + std::to_string(plan.table.entries().size()) + " entries in " +
         std::to_string(plan.table.buckets().size()) + " buckets, " +
         (plan.table.frozen() ? "frozen, " : "not frozen, ") + plan.table.digest() + ">";
}

using Query = std::tuple<std::int64_t, std::int64_t, std::int64_t>;

double lookup_ns(const BoundPlan& plan, const std::vector<Query>& queries, int repeats) {
  if (queries.empty() || repeats < 1) throw py::value_error("lookup_ns needs a query and a repeat");
  std::uintptr_t found = 0;
  const auto start = std::chrono::steady_clock::now();
  for (int i = 0; i < repeats; ++i) {
    for (const auto& [batch_size, mean_kv, skew] : queries) {
      found += reinterpret_cast<std::uintptr_t>(plan.table.lookup(batch_size, mean_kv, skew));
    }
  }
  const std::chrono::duration<double, std::nano> spent = std::chrono::steady_clock::now() - start;
  volatile std::uintptr_t sink = found;  // a result that nobody reads would let the compiler drop the loop
  static_cast<void>(sink);
  return spent.count() / (static_cast<double>(queries.size()) * repeats);
}

// Translated here and not in translate(), which would take every other std::invalid_argument along.
std::int64_t kernel_page_size(std::int64_t block_size) {
  try {
    return decode_dispatch::kernel_page_size(block_size);
  } catch (const std::invalid_argument& error) {
    py::set_error(py::module_::import("dispatch.errors").attr("ConfigError"), error.what());
    throw py::error_already_set();
  }
}

py::tuple batch_of(const py::buffer& lengths) {
  const py::buffer_info info = lengths.request();
  if (info.ndim != 1 || !info.item_type_is_equivalent_to<std::int32_t>() ||
      info.strides[0] != static_cast<py::ssize_t>(sizeof(std::int32_t))) {
    throw py::value_error("the lengths of a batch are contiguous 32-bit integers in one dimension");
  }
  const auto batch = decode_dispatch::batch_of(static_cast<const std::int32_t*>(info.ptr),
                                               static_cast<std::size_t>(info.shape[0]));
  return py::make_tuple(batch.batch_size, batch.mean_kv, batch.skew, batch.max_kv);
}

void translate(std::exception_ptr raised) {
  try {
    if (raised) std::rethrow_exception(raised);
  } catch (const PlanError& error) {
    py::set_error(py::module_::import("dispatch.errors").attr("PlanError"), error.what());
  }
}

}  // namespace

PYBIND11_MODULE(_core, m) {
  m.doc() = "The C++ that engines have too: the table of a tuning decision, and the page size.";
  py::register_local_exception_translator(translate);

  py::class_<PlanEntry>(m, "PlanEntry", "One box of a bucket; bounds inclusive.")
      .def(py::init(&make_entry), py::arg("bucket"), py::arg("mean_kv_min"), py::arg("mean_kv_max"),
           py::arg("skew_min"), py::arg("skew_max"), py::arg("backend"), py::arg("tactic") = "")
      .def_readonly("bucket", &PlanEntry::bucket)
      .def_readonly("mean_kv_min", &PlanEntry::mean_kv_min)
      .def_readonly("mean_kv_max", &PlanEntry::mean_kv_max)
      .def_readonly("skew_min", &PlanEntry::skew_min)
      .def_readonly("skew_max", &PlanEntry::skew_max)
      .def_readonly("backend", &PlanEntry::backend)
      .def_readonly("tactic", &PlanEntry::tactic)
      .def(
          "__eq__", [](const PlanEntry& a, const PlanEntry& b) { return a == b; }, py::is_operator(),
          py::arg("other"))
      .def("__hash__", [](const PlanEntry& e) { return py::hash(fields(e)); })
      .def("__repr__", &entry_repr)
      .def(py::pickle(&fields, &entry_from_fields));

  py::class_<BoundPlan>(m, "BackendPlan",
                        "Bucket and (mean KV, skew) box to backend and tactic.\n\n"
                        "Whatever breaks its contract raises PlanError and leaves it unchanged.")
      .def(py::init(&make_plan), py::arg("buckets"), py::arg("names"))
      .def("set", &set, py::arg("bucket"), py::arg("mean_kv_min"), py::arg("mean_kv_max"),
           py::arg("skew_min"), py::arg("skew_max"), py::arg("backend"), py::arg("tactic") = "",
           "Add a box; bounds inclusive.")
      .def("freeze", &freeze, "End writing and build the index; idempotent.")
      .def("lookup", &lookup, py::arg("batch_size"), py::arg("mean_kv"), py::arg("skew"),
           "The entry for a step, of the smallest bucket that holds the batch; None on a miss.")
      .def("to_bytes", &to_bytes, "The same bytes on every machine for the same content.")
      .def_static("from_bytes", &from_bytes, py::arg("data"), "A frozen plan from to_bytes().")
      .def(
          "digest", [](const BoundPlan& plan) { return plan.table.digest(); },
          "16 hex digits over the content.")
      .def_property_readonly("buckets", [](const BoundPlan& plan) { return plan.table.buckets(); })
      .def_property_readonly("names", [](const BoundPlan& plan) { return plan.table.names(); })
      .def_property_readonly("entries", [](const BoundPlan& plan) { return plan.table.entries(); })
      .def_property_readonly("frozen", [](const BoundPlan& plan) { return plan.table.frozen(); })
      .def("__repr__", &plan_repr)
      .def(py::pickle(&get_state, &from_bytes));

  m.def("lookup_ns", &lookup_ns, py::arg("plan"), py::arg("queries"), py::arg("repeats"),
        "Nanoseconds per C++ lookup over (batch_size, mean_kv, skew) triples, passed `repeats` times.");

  m.def("batch_of", &batch_of, py::arg("lengths"),
        "What a plan is asked: rows, their mean KV length rounded up, the skew; and the longest. `lengths`: int32\n"
        "[rows].");

  m.def("kernel_page_size", &kernel_page_size, py::arg("block_size"),
        "The kernels' page for an engine's block size, both in tokens: the largest of 128, 64, 32 and 16 that "
        "divides it.\n\n"
        "A larger block is block_size / page consecutive pages of a cache that is laid out by pages: in\n"
        "`StepInputs.block_table`, block b is the pages from b * block_size / page on. Raises ConfigError for a\n"
        "block size that is not a multiple of 16 above 0.");
}
