"""`python -m smoke.golden`: make the golden files again, after a change of a model, its weights or the prompts."""

from __future__ import annotations

from smoke.golden import MODELS, make, path_of, write
from smoke.threads import one_thread


def main() -> None:
    one_thread()
    for name in MODELS:
        goldens = make(name)
        write(name, goldens)
        gaps = sorted(gap for golden in goldens for gap in golden.gaps)
        print(f"{path_of(name).name}: {len(goldens)} requests, median gap {gaps[len(gaps) // 2]:.3f}")


if __name__ == "__main__":
    main()
