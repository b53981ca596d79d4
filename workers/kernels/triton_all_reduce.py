"""All-reduce in one kernel: every rank reads all ranks' tensors over NVLink, and sums them itself.

Called by: nccl_group.py, for what is short: there the time goes into steps between GPUs, and this has one.

A program of the grid copies its piece of the tensor into this rank's memory, tells the same program of every peer,
waits until those have told it the same, and sums the pieces in the order of the ranks in float32, so that all ranks
hold the same bits. There are two halves, used by turns: a program that writes a half for the second time has heard from
all peers in the call between, and a peer that tells of a call has read everything of its call before.

The count of calls lives on the device, one for each program, so that a CUDA graph can be replayed. Pieces are cut by
bytes: piece i of any call lies in the same place, whatever its type, and one program alone of each rank touches it. All
programs of a grid must run at once, which MAX_BYTES bounds: a program waits for its like on another GPU, never for
another program of its own.

When a peer dies: the kernel waits for ever; the executor sees the death, and ends this process with its GPU's work.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl

PIECE_BYTES = 8192
MAX_BYTES = 64 * PIECE_BYTES
"""At most so many bytes in one call: fewer programs than any GPU with NVLink has multiprocessors."""
MAX_PIECES = MAX_BYTES // PIECE_BYTES
KERNEL_NAMES = ("_one_shot_kernel",)
"""What a profiler calls the kernel."""


def memory_bytes(size: int) -> int:
    """Return how much memory each of `size` ranks needs: both halves, then a flag for each piece and peer."""
    return 2 * MAX_BYTES + 4 * MAX_PIECES * size


def one_shot_all_reduce(
    x: torch.Tensor, out: torch.Tensor, addresses: torch.Tensor, counts: torch.Tensor, *, rank: int
) -> None:
    """out := the sum over the ranks of x.

    x, out:    contiguous, same shape and dtype (float32, bfloat16, float16), at most MAX_BYTES; may be the same
    addresses: [size] int64 on the device: where each rank's memory is, as this rank sees it; zeros at first
    counts:    [MAX_PIECES] int32 on the device, this rank's own; zeros at first
    """
    num_elements = x.numel()
    if num_elements == 0:
        return
    piece_size = PIECE_BYTES // x.element_size()
    grid = (triton.cdiv(num_elements, piece_size),)
    _one_shot_kernel[grid](
        x,
        out,
        addresses,
        counts,
        rank,
        num_elements,
        NUM_RANKS=addresses.numel(),
        PIECE_SIZE=piece_size,
        HALF_SIZE=MAX_BYTES // x.element_size(),
        FLAGS_AT=2 * MAX_BYTES // 4,
        num_warps=8,
    )


# The number of elements is looked at: only if 16 divides it is a mask the same for 16 bytes, and these one access.
@triton.jit(do_not_specialize=["rank"])
def _one_shot_kernel(
    x_ptr,
    out_ptr,
    addresses_ptr,
    counts_ptr,
    rank,
    num_elements,
    NUM_RANKS: tl.constexpr,
    PIECE_SIZE: tl.constexpr,
    HALF_SIZE: tl.constexpr,
    FLAGS_AT: tl.constexpr,
):
    piece = tl.program_id(0)
    # Wraps around after 2**31 calls; only differences are looked at.
    count = tl.load(counts_ptr + piece) + 1
    offsets = piece * PIECE_SIZE + tl.arange(0, PIECE_SIZE)
    mask = offsets < num_elements
    slots = (count & 1) * HALF_SIZE + offsets
    element_type = tl.pointer_type(x_ptr.dtype.element_ty)
    own = tl.load(addresses_ptr + rank)
    # Addresses out of memory have no known alignment, and would be read two bytes at a time.
    own_data = tl.multiple_of(own.to(element_type), 16)
    tl.store(own_data + slots, tl.load(x_ptr + offsets, mask=mask), mask=mask)
    # All threads have stored before one of them tells (release, for all GPUs).
    tl.debug_barrier()
    for peer in tl.static_range(NUM_RANKS):
        flags = tl.load(addresses_ptr + peer).to(tl.pointer_type(tl.int32)) + FLAGS_AT
        tl.atomic_xchg(flags + piece * NUM_RANKS + rank, count, sem="release", scope="sys")
    own_flags = own.to(tl.pointer_type(tl.int32)) + FLAGS_AT + piece * NUM_RANKS
    for peer in tl.static_range(NUM_RANKS):
        while tl.atomic_add(own_flags + peer, 0, sem="acquire", scope="sys") - count < 0:
            pass
    tl.debug_barrier()
    total = tl.zeros((PIECE_SIZE,), dtype=tl.float32)
    for peer in tl.static_range(NUM_RANKS):
        theirs = tl.multiple_of(tl.load(addresses_ptr + peer).to(element_type), 16)
        # volatile: what this multiprocessor has cached may be of the call before the last.
        total += tl.load(theirs + slots, mask=mask, other=0.0, volatile=True).to(tl.float32)
    tl.store(out_ptr + offsets, total.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(counts_ptr + piece, count)
