"""PagedRows: the rows of one step as paged attention kernels on a GPU take them.

Called by: decode_step.py, prompt_step.py and step_tensors.py make it, on the device and without waiting for it;
attention backends read it. Rows with one new token, decoding ones, stand first, so that a backend may compute them and
the others in two calls.

    rows      0 .. num_decode_rows        one new token each, or padding of a CUDA graph
              num_decode_rows .. num_rows prompts and parts of them, or padding

The token of a decoding row stands at the row's own number among the tokens of the step. A CUDA graph has more decoding
rows than the step: then the tokens of prompts begin at the number of the first row of padding.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedRows:
    """One step.

    prompt_starts: [num_rows - num_decode_rows + 1] int32, where each prompt's new tokens begin among all of the step,
                   and the last one's end; one of padding has none
    kv_lens:       [num_rows] int32, tokens of each row after this step; 0: the row is padding, of which nothing is read
    block_tables:  of each KV cache group, [num_rows, max_blocks] int32; entries beyond a row's blocks, or before its
                   window, are not read
    max_query_len, max_kv_len: of the rows, known on the host; in a CUDA graph what any row may reach
    """

    num_rows: int
    num_decode_rows: int
    prompt_starts: torch.Tensor
    kv_lens: torch.Tensor
    block_tables: tuple[torch.Tensor, ...]
    max_query_len: int
    max_kv_len: int
