"""The kernel's page of an engine's block size: one rule, asked from Python and from a C++ program."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

import dispatch
from dispatch.errors import ConfigError

# block size: page size. A larger page divides none of them: each cofactor is odd, but for 256, where 128 is the most.
PAGES = {
    16: 16,  # 16 x 1
    48: 16,  # 16 x 3
    128: 128,  # 128 x 1
    256: 128,  # 128 x 2
    1088: 64,  # 64 x 17
}
REFUSED = (
    8,  # below the smallest page
    100,  # 4 x 25
    136,  # 8 x 17
    0,  # every page divides it, and it holds no token
    -8,
    -128,  # -1 page
    -(2**63),
)
ASKED = (*PAGES, *REFUSED)

PROGRAM = """
#include "page_size.h"
#include <cstdio>
#include <cstdlib>
int main(int argc, char** argv) {
  for (int i = 1; i < argc; ++i) {
    try {
      std::printf("%lld\\n", static_cast<long long>(decode_dispatch::kernel_page_size(std::atoll(argv[i]))));
    } catch (const std::invalid_argument& error) {
      std::printf("%s\\n", error.what());
    }
  }
}
"""
OTHER_FILE = """
#include "page_size.h"
std::int64_t other_file() { return decode_dispatch::kernel_page_size(16); }
"""


def refusal(block_size: int) -> str:
    return (
        f"block size {block_size}: must be a multiple of 16 above 0, since a page of the kernels holds 128, 64, 32 or "
        "16 tokens"
    )


def python_answers(block_sizes: Sequence[int]) -> list[str]:
    answers = []
    for block_size in block_sizes:
        try:
            answers.append(str(dispatch.kernel_page_size(block_size)))
        except ConfigError as error:
            answers.append(str(error))
    return answers


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from two files that include the header, and none of the table's."""
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("page_size")
    for name, text in (("main.cc", PROGRAM), ("other.cc", OTHER_FILE)):
        (folder / name).write_text(text)
    command = ["g++", "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{dispatch.get_include()}"]
    command += ["main.cc", "other.cc", "-o", "program"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "program"


def cpp_answers(program: Path, block_sizes: Sequence[int]) -> list[str]:
    done = subprocess.run([program, *map(str, block_sizes)], capture_output=True, text=True, check=True, timeout=60)
    return done.stdout.splitlines()


@pytest.mark.parametrize(("block_size", "page_size"), PAGES.items())
def test_page_is_the_largest_that_divides_the_block(block_size: int, page_size: int) -> None:
    assert dispatch.kernel_page_size(block_size) == page_size


@pytest.mark.parametrize("block_size", REFUSED)
def test_block_without_a_page_is_refused_in_one_line_that_names_it(block_size: int) -> None:
    with pytest.raises(ConfigError) as caught:
        dispatch.kernel_page_size(block_size)
    assert str(caught.value) == refusal(block_size)


def test_page_is_the_blocks_factor_of_two_up_to_128() -> None:
    # n & -n is the largest power of two that divides n; pages are the powers from 16 to 128
    sizes = (*range(1, 2049), 2**62, 2**62 + 32, 2**63 - 1)
    expected = [str(min(n & -n, 128)) if n & -n >= 16 else refusal(n) for n in sizes]
    assert python_answers(sizes) == expected


def test_cpp_program_derives_the_page_that_the_arithmetic_gives(program: Path) -> None:
    assert cpp_answers(program, ASKED) == [*map(str, PAGES.values()), *map(refusal, REFUSED)]


def test_cpp_and_python_give_the_same_pages_and_the_same_messages(program: Path) -> None:
    sizes = (*ASKED, *range(-300, 2049), 2**62, 2**63 - 1)
    assert cpp_answers(program, sizes) == python_answers(sizes)


def test_build_of_a_wheel_puts_the_header_beside_the_table(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "setup.py",
        "-q",
        "egg_info",
        "-e",
        str(tmp_path),
        "build_py",
        "-d",
        str(tmp_path / "lib"),
    ]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    shipped = {path.name for path in (tmp_path / "lib" / "dispatch" / "include").iterdir()}
    assert shipped == {"backend_plan.h", "backend_plan.cc", "page_size.h"}


@pytest.mark.parametrize("block_size", [16.0, "16", None, 2**63])
def test_what_is_no_int64_is_a_type_error(block_size: object) -> None:
    with pytest.raises(TypeError, match="incompatible function arguments"):
        dispatch.kernel_page_size(block_size)  # type: ignore[arg-type]
