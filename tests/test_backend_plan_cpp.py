"""The table in a C++ program: built with nothing but get_include(), read from several threads."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dispatch import include_path
from dispatch._core import BackendPlan
from dispatch.errors import DispatchError
from dispatch.include_path import get_include

EXAMPLE = Path(__file__).parents[1] / "smoke" / "cpp" / "lookup.cc"
STRICT = ["-std=c++17", "-Wall", "-Wextra", "-Werror"]

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")

FILL = """
#include "backend_plan.h"
using decode_dispatch::BackendPlan;
BackendPlan filled() {
  BackendPlan plan({8, 16}, {"fa3", "flashinfer_xqa"});
  for (int i = 0; i < 200; ++i) {
    plan.set({8, i * 10, i * 10 + 9, 0, 100000, i % 2 ? "fa3" : "flashinfer_xqa", "num_splits=4"});
  }
  plan.freeze();
  return plan;
}
"""

# Every lookup of every thread must find the entry that the bounds say; ThreadSanitizer watches.
THREADS = (
    FILL
    + """
#include <atomic>
#include <thread>
int main() {
  const BackendPlan plan = filled();
  std::atomic<int> wrong{0};
  std::vector<std::thread> readers;
  for (int thread = 0; thread < 4; ++thread) {
    readers.emplace_back([&plan, &wrong, thread] {
      for (int i = 0; i < 20000; ++i) {
        const int mean = (i * 7 + thread) % 2100;
        const auto* entry = plan.lookup(1 + i % 8, mean, 5000);
        const bool right = mean < 2000 ? entry && entry->mean_kv_min == mean / 10 * 10 : entry == nullptr;
        if (!right) ++wrong;
      }
    });
  }
  for (auto& reader : readers) reader.join();
  return wrong == 0 ? 0 : 1;
}
"""
)

# argv[1] is how many times its own size a plan may allocate while it is read.
MEMORY = (
    """
#include <cstdlib>
#include <new>
static std::size_t allocated = 0;
void* operator new(std::size_t size) {
  allocated += size;
  if (void* memory = std::malloc(size)) return memory;
  throw std::bad_alloc();
}
void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
"""
    + FILL
    + """
#include <cstdio>
int main(int, char** argv) {
  const BackendPlan plan = filled();
  const std::string bytes = plan.to_bytes();
  allocated = 0;
  for (int i = 0; i < 5000; ++i) plan.lookup(i % 20, i % 3000, i);
  std::printf("lookups allocated %zu bytes\\n", allocated);
  allocated = 0;
  const BackendPlan read = BackendPlan::from_bytes(bytes.data(), bytes.size());
  std::printf("reading allocated %s\\n", allocated <= std::atoi(argv[1]) * bytes.size() ? "little" : "too much");
}
"""
)


def compile_cpp(out: Path, *arguments: str | Path) -> Path:
    command = ["g++", *STRICT, f"-I{get_include()}", *map(str, arguments), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out


def run(program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([program, *map(str, arguments)], capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def table_object(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("table") / "backend_plan.o"
    return compile_cpp(out, "-c", Path(get_include(), "backend_plan.cc"))


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory, table_object: Path) -> Path:
    return compile_cpp(tmp_path_factory.mktemp("example") / "lookup", EXAMPLE, table_object)


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    plan = BackendPlan([8, 16], ["fa3", "flashinfer_cudnn"])
    plan.set(8, 1, 4096, 1000, 4000, backend="fa3", tactic="num_splits=4")
    plan.set(16, 1, 4096, 1000, 4000, backend="flashinfer_cudnn")
    path = tmp_path_factory.mktemp("plan") / "plan.bin"
    path.write_bytes(plan.to_bytes())
    return path


@needs_compiler
@pytest.mark.parametrize(
    ("lengths", "answer"),
    [
        ([4096] * 8, "fa3 num_splits=4\n"),
        ([4096] * 9, "flashinfer_cudnn\n"),
        ([4096] * 7 + [4097], "default\n"),  # a mean of 4096.1 counts as 4097
        ([4096] * 17, "default\n"),
        ([1] * 7 + [9], "default\n"),  # the longest is 4.5 times the mean of 2
        ([1] * 7 + [8], "fa3 num_splits=4\n"),  # and here 4 times, for a mean of 1.9 counts as 2
    ],
)
def test_cpp_program_answers_from_a_plan_that_python_wrote(
    example: Path, plan_file: Path, lengths: list[int], answer: str
) -> None:
    done = run(example, plan_file, *lengths)
    assert (done.returncode, done.stdout, done.stderr) == (0, answer, "")


@needs_compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data[:-1] + bytes([data[-1] ^ 1]), "checksum"),
        (lambda data: data[:40], "truncated"),
        (lambda data: b"", "truncated"),
        (lambda data: b"{" + data, "not a plan"),
    ],
    ids=["flipped", "short", "empty", "foreign"],
)
def test_cpp_program_refuses_a_bad_file_in_one_line(
    example: Path, plan_file: Path, tmp_path: Path, change: object, message: str
) -> None:
    bad = tmp_path / "bad.bin"
    bad.write_bytes(change(plan_file.read_bytes()))  # type: ignore[operator]
    done = run(example, bad, 8, 1, 1)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert message in done.stderr


@needs_compiler
def test_cpp_program_refuses_a_missing_file_and_an_unreadable_number(example: Path, plan_file: Path) -> None:
    for arguments in ([plan_file.parent / "none", 8, 1, 1], [plan_file, "8x", 1, 1]):
        done = run(example, *arguments)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)


@needs_compiler
def test_lookups_allocate_nothing_and_reading_a_plan_a_few_times_its_size(tmp_path: Path, table_object: Path) -> None:
    source = tmp_path / "memory.cc"
    source.write_text(MEMORY)
    done = run(compile_cpp(tmp_path / "memory", source, table_object), 6)
    assert done.stdout == "lookups allocated 0 bytes\nreading allocated little\n"


@needs_compiler
def test_threads_read_a_frozen_plan_without_a_race(tmp_path: Path) -> None:
    probe = tmp_path / "probe.cc"
    probe.write_text("int main() { return 0; }\n")
    sanitize = ["g++", "-fsanitize=thread", str(probe), "-o", str(tmp_path / "probe")]
    if subprocess.run(sanitize, capture_output=True).returncode or run(tmp_path / "probe").returncode:
        pytest.skip("ThreadSanitizer does not work here")
    source = tmp_path / "threads.cc"
    source.write_text(THREADS)
    table = Path(get_include(), "backend_plan.cc")
    program = compile_cpp(tmp_path / "threads", "-fsanitize=thread", "-g", "-O1", source, table)
    done = run(program)
    assert done.returncode == 0, done.stderr


def test_get_include_prefers_the_installed_sources(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(include_path, "__file__", str(tmp_path / "dispatch" / "include_path.py"))
    for folder in ("dispatch/include", "csrc"):
        (tmp_path / folder).mkdir(parents=True)
        for source in ("backend_plan.h", "backend_plan.cc", "page_size.h"):
            (tmp_path / folder / source).touch()
    assert get_include() == str(tmp_path / "dispatch" / "include")
    (tmp_path / "dispatch" / "include" / "backend_plan.cc").unlink()
    assert get_include() == str(tmp_path / "csrc")


def test_get_include_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(include_path, "__file__", str(tmp_path / "dispatch" / "include_path.py"))
    with pytest.raises(DispatchError, match=r"backend_plan\.h, backend_plan\.cc, page_size\.h are in neither"):
        get_include()


SHIM = """
#include "backend_plan.h"
#include "page_size.h"
extern "C" const char* overlap() {
  static std::string message;
  decode_dispatch::BackendPlan plan({4}, {"fa3"});
  plan.set({4, 1, 2, 3, 4, "fa3", ""});
  try {
    plan.set({4, 2, 2, 3, 3, "fa3", ""});
  } catch (const decode_dispatch::PlanError& error) {
    message = error.what();
  }
  return message.c_str();
}
extern "C" const char* page_size() {
  static std::string message;
  try {
    decode_dispatch::kernel_page_size(136);
  } catch (const std::invalid_argument& error) {
    message = error.what();
  }
  return message.c_str();
}
"""


def test_a_build_with_its_own_copy_of_the_cpp_library_works_beside_torchs(tmp_path: Path) -> None:
    # with std::ostringstream in the table, this message ended after "bucket " here, and a GPU node's build crashed
    (tmp_path / "shim.cc").write_text(SHIM)
    sources = [str(tmp_path / "shim.cc"), f"{get_include()}/backend_plan.cc"]
    options = ["-std=c++17", "-O2", "-shared", "-fPIC", "-static-libstdc++", f"-I{get_include()}"]
    subprocess.run(["g++", *options, *sources, "-o", str(tmp_path / "shim.so")], check=True)
    code = """
import ctypes, torch
shim = ctypes.CDLL("./shim.so")
for message in (shim.overlap, shim.page_size):
    message.restype = ctypes.c_char_p
    print(message().decode())
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == (
        "bucket 4: mean KV 2..2, skew 3..3 overlaps mean KV 1..2, skew 3..4\n"
        "block size 136: must be a multiple of 16 above 0, since a page of the kernels holds 128, 64, 32 or 16 tokens\n"
    )
