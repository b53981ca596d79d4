"""What stands in the settings that nobody has set, where the best value depends on the device.

Called by: engine_options.py and launch/config.py, which know what was set. Imports no torch.
"""

from collections.abc import Mapping

from ..workers.config import DeviceType

CUDA_DEFAULTS: Mapping[str, int] = {
    # Our decode kernel reads 64 tokens of a head at a time; blocks of 16 cost it 2 to 8 %.
    "cache.block_size": 64,
    # Prompts of 16k tokens, for fewer rows leave a large GPU idle, and one token for each running request beside them.
    "scheduler.max_num_batched_tokens": 16640,
}
"""By dotted names, which every section's field has; measured on an H200."""


def device_defaults(device: DeviceType, *, num_gpus: int) -> Mapping[str, int]:
    """Return `CUDA_DEFAULTS` where ranks will compute on a GPU, else nothing. num_gpus: of this host."""
    is_cuda = device is DeviceType.CUDA or (device is DeviceType.AUTO and num_gpus > 0)
    return CUDA_DEFAULTS if is_cuda else {}
