"""What one step computes, on the host: the arrays that InputBatch makes and the model runner sends to the device.

Called by: input_batch.py makes them; model_runner.py, forward_pass.py and what they call read them. In a worker
process.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .forward_context import StepRows

Ints = npt.NDArray[np.int64]

ON_DEVICE = -1
"""In place of a token id: sampled, and known on the device alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInput:
    """One step on the host. Rows stand in the order of their tokens; all int64.

    request_ids, row_index: [num_rows]
    places:                 [num_rows] where each stands in the scheduler's order
    row_of_token:           [num_tokens] which of row_index
    token_ids, positions:   [num_tokens]; a token id may be ON_DEVICE
    sampling_rows:          [num_sampling] which of the step's rows sample
    last_token_index:       [num_sampling] where their last token stands among the step's tokens
    """

    request_ids: list[str]
    row_index: Ints
    places: Ints
    row_of_token: Ints
    token_ids: Ints
    positions: Ints
    rows: StepRows
    sampling_rows: Ints
    last_token_index: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledTokens:
    """Where the tokens of a step go when they are known. All [n] int64.

    rows, places: in the rows' tokens; -1 as a place: nowhere
    holders:      who held the rows: they may be others' by then
    """

    rows: Ints
    places: Ints
    holders: Ints


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRows:
    """A step in which every row has one new token, sampled before, and is drawn plainly. Arrays [num_rows] int64.

    sample_positions: output tokens that each has; new_blocks: see `DeviceRows.take_decode_blocks`
    """

    request_ids: list[str]
    row_index: Ints
    positions: Ints
    sample_positions: Ints
    new_blocks: Ints
    sampled: SampledTokens
