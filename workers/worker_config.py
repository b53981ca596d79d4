"""WorkerConfig: all that one rank is told when it starts.

Called by: the executors build it, one for each rank; it crosses to the worker process as msgpack. Torch-free.
"""

import msgspec

from .config import CacheConfig, ModelConfig, ParallelConfig


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's part of the configuration, and its place among its peers.

    max_num_seqs, max_num_batched_tokens: the scheduler's limits of one step; they size rows and the profile run
    tp_rank:      which of `parallel.tensor_parallel_size` ranks this is
    device_index: which GPU of the host; ignored on CPU
    rendezvous:   path of the file in which the ranks of this replica find each other, usually an inherited
                  descriptor ("/proc/self/fd/7"). None only when there is one rank
    host_rank:    which of the `num_host_ranks` of this host, all replicas together, this is
    expected_free_bytes: free on its GPU when this rank was started for the first time; None: this is the first time
    arena_fd:     inherited descriptor of the shared memory in which ranks on CPU exchange; None: they use gloo
    """

    model: ModelConfig
    cache: CacheConfig
    parallel: ParallelConfig
    max_num_seqs: int
    max_num_batched_tokens: int
    tp_rank: int
    device_index: int
    rendezvous: str | None
    arena_fd: int | None = None
    host_rank: int = 0
    num_host_ranks: int = 1
    expected_free_bytes: int | None = None
