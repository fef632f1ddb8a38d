"""StepInputs: what changes from one decode step to the next."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(slots=True)
class StepInputs:
    """The buffers of one bucket. They are refreshed in place and never move: a captured graph points at them.

    One object a bucket: an engine sets `num_live` at each step, and the tensors' contents.

    num_live: requests among the bucket's rows; the rest is padding, of length 1 on a reserved page.
    lengths_host: int32 [bucket], on the host, not pinned, so that a copy to the device takes what it holds at the
        call. KV tokens of each row, the new one included. An engine that schedules ahead may know only an upper bound
        here.
    lengths: int32 [bucket], on the device; exact.
    block_table: int32 [bucket, max pages], on the device; entries behind a row's last page are any valid page.
    """

    num_live: int
    lengths_host: torch.Tensor
    lengths: torch.Tensor
    block_table: torch.Tensor
