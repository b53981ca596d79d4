"""StepTensors: a step on the device, of any kind of rows, made from what the host knows of it.

Called by: forward_pass.py, for a step that is launched kernel by kernel. On a GPU nothing here waits for the device:
one copy from pinned memory takes everything, and tokens that only the device knows are looked up there.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from .device_rows import DeviceRows
from .forward_context import ForwardContext, build_forward_context, slot_mapping
from .paged_rows import PagedRows
from .step_input import ON_DEVICE, StepInput
from .upload import upload


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTensors:
    """All int64 on the device.

    token_ids, positions: [num_tokens]
    last_token_index:     [num_sampling] where the last tokens of the rows that sample stand
    sampling_row_index:   [num_sampling] numbers of these rows
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    last_token_index: torch.Tensor
    sampling_row_index: torch.Tensor
    context: ForwardContext


def make_step_tensors(
    step: StepInput,
    on_device: DeviceRows,
    *,
    windows: Sequence[int | None],
    dtype: torch.dtype,
    device: torch.device,
    is_paged: bool,
) -> StepTensors:
    """is_paged: attention reads block tables, so the context has rows; otherwise it has groups."""
    row_of_token = step.row_index[step.row_of_token]
    sampling_row_index = step.row_index[step.sampling_rows]
    arrays = [step.token_ids, step.positions, step.last_token_index, sampling_row_index, row_of_token]
    if is_paged:
        arrays += [step.row_index, _prompt_starts(step), step.rows.kv_lens, slot_mapping(step.rows)]
    token_ids, positions, last_token_index, sampling_rows, rows_of_tokens, *paged = upload(arrays, device)
    if (step.token_ids == ON_DEVICE).any():
        sampled = on_device.last_tokens.index_select(0, rows_of_tokens)
        token_ids = torch.where(token_ids == ON_DEVICE, sampled, token_ids)
    if is_paged:
        context = _paged_context(step, on_device, windows, *paged)
    else:
        context = build_forward_context(step.rows, windows=windows, dtype=dtype, device=device)
    return StepTensors(
        token_ids=token_ids,
        positions=positions,
        last_token_index=last_token_index,
        sampling_row_index=sampling_rows,
        context=context,
    )


def _prompt_starts(step: StepInput) -> npt.NDArray[np.int64]:
    """Rows of one new token stand first."""
    lens = step.rows.query_lens
    num_decode = int((lens == 1).sum())
    return np.concatenate([[num_decode], num_decode + np.cumsum(lens[num_decode:])])


def _paged_context(
    step: StepInput,
    on_device: DeviceRows,
    windows: Sequence[int | None],
    row_index: torch.Tensor,
    prompt_starts: torch.Tensor,
    kv_lens: torch.Tensor,
    slot_mappings: torch.Tensor,
) -> ForwardContext:
    on_device.send_blocks()
    rows = step.rows
    num_blocks = rows.block_tables.shape[2]
    tables = on_device.block_tables[:, :, :num_blocks].index_select(1, row_index)
    return ForwardContext(
        windows=windows,
        slot_mappings=slot_mappings.unbind(0),
        rows=PagedRows(
            num_rows=len(rows.query_lens),
            num_decode_rows=int((rows.query_lens == 1).sum()),
            prompt_starts=prompt_starts.int(),
            kv_lens=kv_lens.int(),
            block_tables=tables.unbind(0),
            max_query_len=int(rows.query_lens.max()),
            max_kv_len=int(rows.kv_lens.max()),
        ),
    )
