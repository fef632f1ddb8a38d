"""Flags and environment variables."""

from __future__ import annotations

import argparse
import copy
import dataclasses
import math
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import dispatch
from dispatch.config import OPTIONS, DispatchConfig, _rebuild, add_arguments
from dispatch.errors import ConfigError
from dispatch.option import Option

ROOT = Path(dispatch.__file__).parents[1]
BY_NAME = {option.name: option for option in OPTIONS}

SERVE = """
import argparse
from dispatch.config import DispatchConfig, add_arguments
parser = argparse.ArgumentParser(prog="serve")
add_arguments(parser)
print(DispatchConfig.from_args(parser.parse_args()))
"""

_NOT_A_FRACTION = ["nan", "inf", "-inf", "1", "1.5", "-0.01", "3%", "0,03", "three", "0x1", "1e400"]
BAD_TEXT = [
    *(("enabled", text) for text in ("2", "maybe", "t", "None", "enable", "truetrue")),
    *(("threshold", text) for text in _NOT_A_FRACTION),
    *(("cluster_margin", text) for text in _NOT_A_FRACTION),
    *(("exclude", text) for text in ("fa3 fa2", "fa3;fa2", "3fa", "fa3,fa2[num_splits=4]", "['fa3']")),
    *(
        (name, text)
        for name in ("time_budget_s", "capture_budget_s", "capture_budget_mib")
        for text in ("0", "-1", "nan", "inf", "60s", "1m", "1e400")
    ),
    *(("isolation", text) for text in ("thread", "process,none", "off")),
    ("cache_dir", "plans\0"),
]
BAD_VALUES = [
    *BAD_TEXT,
    *((option.name, b"1") for option in OPTIONS),
    *((option.name, object) for option in OPTIONS),
    *((option.name, {}) for option in OPTIONS),
    *((option.name, None) for option in OPTIONS if option.name != "cache_dir"),
    *((name, "") for name in ("enabled", "threshold", "cluster_margin", "time_budget_s", "isolation", "cache_dir")),
    ("isolation", False),
    ("enabled", 1),
    ("enabled", 0.0),
    ("threshold", False),
    ("threshold", math.nan),
    ("threshold", 10**400),
    ("threshold", [0.03]),
    ("cluster_margin", -0.1),
    ("time_budget_s", math.inf),
    ("time_budget_s", True),
    ("exclude", ["fa3", 3]),
    ("exclude", ("fa3", "")),
    ("exclude", ("fa3,fa2",)),
    ("cache_dir", 3),
]

GOOD = [
    *(("enabled", text, True) for text in ("1", "true", "TRUE", "Yes", "on", " on ")),
    *(("enabled", text, False) for text in ("0", "false", "False", "NO", "oFF")),
    ("threshold", "0", 0.0),
    ("threshold", " 0.05 ", 0.05),
    ("threshold", "5e-2", 0.05),
    ("cluster_margin", "0.999", 0.999),
    ("exclude", "fa3", ("fa3",)),
    ("exclude", " flashinfer_xqa , fa3,", ("flashinfer_xqa", "fa3")),
    ("exclude", "fa3,fa3", ("fa3",)),
    ("time_budget_s", "1e3", 1000.0),
    ("capture_budget_s", "12.5", 12.5),
    ("capture_budget_mib", "512", 512.0),
    ("isolation", "none", "none"),
    ("isolation", " Process ", "process"),
    ("cache_dir", "plans/here", Path("plans/here")),
]


def run(code: str, *args: str, env: dict[str, str] | None = None, data: bytes = b"") -> tuple[int, bytes, str]:
    """A child process's exit status, standard output and standard error."""
    child = subprocess.run(
        [sys.executable, "-c", code, *args],
        cwd=ROOT,
        env=env or {},
        input=data,
        capture_output=True,
        timeout=60,
    )
    return child.returncode, child.stdout, child.stderr.decode()


def parse(*args: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(exit_on_error=False)
    add_arguments(parser)
    return parser.parse_args(args)


def test_without_flags_and_environment_it_is_off_with_the_documented_defaults() -> None:
    config = DispatchConfig.from_env({})
    assert config == DispatchConfig()
    assert dataclasses.asdict(config) == {
        "enabled": False,
        "threshold": 0.03,
        "cluster_margin": 0.01,
        "exclude": (),
        "time_budget_s": 180.0,
        "capture_budget_s": 60.0,
        "capture_budget_mib": 2048.0,
        "isolation": "process",
        "cache_dir": None,
    }


def test_every_field_has_one_option_with_names_of_its_own() -> None:
    assert [option.name for option in OPTIONS] == [field.name for field in dataclasses.fields(DispatchConfig)]
    assert [(option.flag, option.env) for option in OPTIONS] == [
        ("--enable_dynamic_decode_backend", "ENABLE_DYNAMIC_DECODE_BACKEND"),
        ("--dyn_decode_threshold", "DYN_DECODE_THRESHOLD"),
        ("--dyn_decode_cluster_margin", "DYN_DECODE_CLUSTER_MARGIN"),
        ("--dyn_decode_exclude", "DYN_DECODE_EXCLUDE"),
        ("--dyn_decode_time_budget", "DYN_DECODE_TIME_BUDGET"),
        ("--dyn_decode_capture_seconds", "DYN_DECODE_CAPTURE_SECONDS"),
        ("--dyn_decode_capture_mib", "DYN_DECODE_CAPTURE_MIB"),
        ("--dyn_decode_isolation", "DYN_DECODE_ISOLATION"),
        ("--dyn_decode_cache_dir", "DYN_DECODE_CACHE_DIR"),
    ]


@pytest.mark.parametrize(("name", "text", "value"), GOOD)
def test_a_good_text_means_the_same_by_environment_flag_override_and_directly(
    name: str, text: str, value: object
) -> None:
    option = BY_NAME[name]
    for config in (
        DispatchConfig.from_env({option.env: text}),
        DispatchConfig.from_args(parse(f"{option.flag}={text}"), {}),
        DispatchConfig.from_env({}, **{name: text}),
        DispatchConfig(**{name: text}),
        DispatchConfig(**{name: value}),
    ):
        assert getattr(config, name) == value
        assert type(getattr(config, name)) is type(value)


@pytest.mark.parametrize(("name", "text"), BAD_TEXT)
def test_a_bad_environment_value_is_refused_by_variable_value_and_allowed(name: str, text: str) -> None:
    option = BY_NAME[name]
    with pytest.raises(ConfigError) as caught:
        DispatchConfig.from_env({option.env: text})
    assert str(caught.value) == f"{option.env}={text!r}: must be {option.allowed}"


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_a_bad_value_given_directly_is_refused_by_flag(name: str, value: object) -> None:
    option = BY_NAME[name]
    with pytest.raises(ConfigError) as caught:
        DispatchConfig(**{name: value})
    assert str(caught.value).startswith(f"{option.flag}=")
    assert str(caught.value).endswith(f": must be {option.allowed}")


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, value in BAD_VALUES if value is not None])
def test_a_bad_override_is_refused_by_flag_although_the_environment_is_good(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{BY_NAME[name].flag}="):
        DispatchConfig.from_env({"DYN_DECODE_THRESHOLD": "0.05"}, **{name: value})


@pytest.mark.parametrize(("name", "text"), BAD_TEXT)
def test_a_bad_flag_is_refused_by_flag_value_and_allowed(name: str, text: str) -> None:
    option = BY_NAME[name]
    with pytest.raises(argparse.ArgumentError) as caught:
        parse(f"{option.flag}={text}")
    for part in (option.flag, repr(text), option.allowed):
        assert part in str(caught.value)


def test_the_message_reads_as_documented() -> None:
    with pytest.raises(ConfigError) as caught:
        DispatchConfig.from_env({"DYN_DECODE_THRESHOLD": "nan"})
    assert str(caught.value) == "DYN_DECODE_THRESHOLD='nan': must be a number from 0 up to, not including, 1"


def test_an_endless_value_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigError) as caught:
        DispatchConfig.from_env({"DYN_DECODE_THRESHOLD": "9" * 100_000})
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
@pytest.mark.parametrize("text", ["", "  "])
def test_an_empty_environment_value_counts_as_unset(option: Option, text: str) -> None:
    assert DispatchConfig.from_env({option.env: text}) == DispatchConfig()


def test_an_override_wins_over_the_environment_and_the_environment_over_the_default() -> None:
    env = {"DYN_DECODE_THRESHOLD": "0.1", "DYN_DECODE_CLUSTER_MARGIN": "0.2"}
    config = DispatchConfig.from_env(env, threshold=0.3, cluster_margin=None)
    assert (config.threshold, config.cluster_margin, config.time_budget_s) == (0.3, 0.2, 180.0)


def test_an_override_that_is_false_zero_or_empty_is_still_given() -> None:
    env = {"ENABLE_DYNAMIC_DECODE_BACKEND": "1", "DYN_DECODE_THRESHOLD": "0.1", "DYN_DECODE_EXCLUDE": "fa3"}
    config = DispatchConfig.from_env(env, enabled=False, threshold=0, exclude="")
    assert (config.enabled, config.threshold, config.exclude) == (False, 0.0, ())


def test_an_override_that_is_no_field_is_an_error() -> None:
    with pytest.raises(TypeError, match="treshold"):
        DispatchConfig.from_env({}, treshold=0.1)


def test_the_process_environment_is_read_at_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DYN_DECODE_TIME_BUDGET", "7")
    assert DispatchConfig.from_env().time_budget_s == 7.0
    assert DispatchConfig.from_args(argparse.Namespace()).time_budget_s == 7.0


def test_a_flag_wins_over_the_environment_which_shows_through_where_no_flag_is_given() -> None:
    env = {"DYN_DECODE_THRESHOLD": "0.1", "DYN_DECODE_EXCLUDE": "fa3"}
    config = DispatchConfig.from_args(parse("--dyn_decode_threshold", "0.2"), env)
    assert (config.threshold, config.exclude) == (0.2, ("fa3",))


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.name)
def test_each_flag_may_be_spelt_with_dashes(option: Option) -> None:
    text = next(text for name, text, _ in GOOD if name == option.name)
    dashed = "--" + option.flag.removeprefix("--").replace("_", "-")
    assert parse(f"{dashed}={text}") == parse(f"{option.flag}={text}")


@pytest.mark.parametrize(
    ("args", "enabled"),
    [
        (["--enable_dynamic_decode_backend"], True),
        (["--enable-dynamic-decode-backend"], True),
        (["--enable_dynamic_decode_backend=false"], False),
        (["--enable_dynamic_decode_backend", "--dyn_decode_threshold=0"], True),
        ([], True),
    ],
)
def test_the_enable_flag_works_bare_and_with_a_value(args: list[str], enabled: bool) -> None:
    env = {"ENABLE_DYNAMIC_DECODE_BACKEND": "on"}
    assert DispatchConfig.from_args(parse(*args), env).enabled is enabled


def test_minus_zero_is_zero() -> None:
    # The two print differently, and a plan is stored under the printed threshold.
    assert math.copysign(1, DispatchConfig(threshold=-0.0).threshold) == 1


def test_a_home_folder_that_no_shell_expanded_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/somewhere")
    assert DispatchConfig(cache_dir="~/plans").cache_dir == Path("/somewhere/plans")


def test_it_is_frozen_hashable_and_replaceable_with_checks() -> None:
    config = DispatchConfig(exclude=["fa3"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.threshold = 0.5
    assert hash(config) == hash(DispatchConfig(exclude=("fa3",)))
    with pytest.raises(ConfigError, match="--dyn_decode_threshold=2"):
        dataclasses.replace(config, threshold=2)


CHANGED = DispatchConfig(
    enabled=True, threshold=0.1, cluster_margin=0, exclude=("fa3",), time_budget_s=5, cache_dir="plans"
)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_gives_an_equal_config(protocol: int) -> None:
    assert pickle.loads(pickle.dumps(CHANGED, protocol)) == CHANGED
    assert copy.deepcopy(CHANGED) == CHANGED


class _Older:
    """Pickles as a DispatchConfig of another version did: one field known, five lacking, one unknown."""

    def __reduce__(self) -> tuple[object, tuple[dict[str, object]]]:
        return _rebuild, ({"threshold": 0.1, "warm_up_s": 3},)


def test_a_pickle_of_another_version_loads_with_defaults_for_what_it_lacks() -> None:
    assert pickle.loads(pickle.dumps(_Older())) == DispatchConfig(threshold=0.1)


def test_a_pickle_loads_in_a_child_process() -> None:
    code = "import pickle, sys; sys.stdout.buffer.write(pickle.dumps(pickle.load(sys.stdin.buffer)))"
    for sent, received in ((CHANGED, CHANGED), (_Older(), DispatchConfig(threshold=0.1))):
        status, out, err = run(code, data=pickle.dumps(sent))
        assert (status, err) == (0, "")
        assert pickle.loads(out) == received


def test_a_server_with_good_flags_and_environment_starts() -> None:
    status, out, err = run(
        SERVE,
        "--enable-dynamic-decode-backend",
        "--dyn_decode_exclude=fa3",
        env={"DYN_DECODE_THRESHOLD": "0.1"},
    )
    assert (status, err) == (0, "")
    assert out.decode().strip() == str(DispatchConfig(enabled=True, exclude=("fa3",), threshold=0.1))


@pytest.mark.parametrize(
    ("flag", "text", "allowed"),
    [
        ("--dyn_decode_threshold", "nan", "a number from 0 up to, not including, 1"),
        ("--dyn_decode_time_budget", "-1", "a finite number of seconds above 0"),
        ("--enable_dynamic_decode_backend", "maybe", "true or false"),
    ],
)
def test_a_server_with_a_bad_flag_exits_with_status_2(flag: str, text: str, allowed: str) -> None:
    status, _, err = run(SERVE, flag, text)
    assert status == 2
    assert f"{flag}={text!r}: must be {allowed}" in err
    assert "Traceback" not in err


def test_help_names_every_flag_and_variable() -> None:
    status, out, _ = run(SERVE, "--help")
    assert status == 0
    for option in OPTIONS:
        assert option.flag in out.decode()
        assert option.env in out.decode()


def test_neither_torch_nor_numpy_is_imported() -> None:
    code = "import sys, dispatch.config; sys.exit(len({'torch', 'numpy'} & set(sys.modules)))"
    assert run(code) == (0, b"", "")
