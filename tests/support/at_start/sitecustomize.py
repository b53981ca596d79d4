"""Imported by every interpreter that has this folder on its path, before all else: see process_faults.py."""

import sys

_CHILD = "phalanx.shm.child"

if _CHILD in sys.orig_argv:
    from support.process_faults import plant

    # Behind it: two descriptors, the parent's pid, the role.
    plant(sys.orig_argv[sys.orig_argv.index(_CHILD) + 4])
