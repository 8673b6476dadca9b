"""All constants that are tuned to a processor or measured on one.

Measured on Zen 3 and 4 (`AMD`), and on Sapphire and Granite Rapids for all other processors.
Constants that follow from the size of a cache or an array are defined where they are used.
"""

from __future__ import annotations

import llvmlite.binding

AMD = llvmlite.binding.get_host_cpu_name().startswith("znver")

# ---- Matmuls: `registers`, `tile` ----

# Most numbers in a row of a panel. With 256, w's panels stay in an L2 cache of 2 MB, and a panel of
# each factor in an L1 cache of 48 KB. On Intel's cores matmuls of several hundred rows then take 5
# to 25 % less time than with 512.
DEPTH = 512 if AMD else 256
# Numbers between the columns in a panel of a column-major x; 0: as many as a tile has rows.
SLOT = 16 if AMD else 0
# A factor is read in place, not copied to panels, if it spans at most NEAR bytes, or if the other
# factor has at most FEW_ROWS rows or FEW_COLUMNS columns. A core that multiplies twice as many
# numbers a second waits for numbers that are not side by side.
NEAR, FEW_ROWS, FEW_COLUMNS = (1 << 19, 192, 192) if AMD else (0, 0, 64)
GROUP = 1 if AMD else 8  # panels of a row-major w that are copied at once

# ---- Products of vectors: `vectors`, `kernels/gemm` ----

# Whether several rows are read together; AMD's cores read one row after the other twice as fast.
TOGETHER = not AMD
VECTORS = 4  # most rows of x that are each multiplied as a vector
# Weights from which on pieces are rows of w, which is 2 to 3 times as fast as columns.
LARGE = 1 << 16
# Least weights of a piece, and pieces for each thread: a late thread computes fewer pieces.
SHARE, SHARES = 1 << 14, 4
SMALL = 1_000_000  # multiplications up to which OpenBLAS copies neither factor
ALONE = 1 << 18  # multiplications up to which OpenBLAS does not use its own threads
SPEED = 16  # multiplications in the time of one element of a simple loop

# ---- Attention: `flash`, `kernels/sdpa` ----

# Most keys of a tile that not all queries attend to; the other queries skip it. 0: as many as in
# other tiles.
NARROW = 0 if AMD else 96
COLUMNS, WIDE = 256 if AMD else 384, 1024  # most keys of a tile; most keys of a single tile
# Least and most queries of a tile if queries attend to different numbers of keys. Half of a tile on
# the diagonal is wasted, so short sequences have fewer. Tiles of long sequences, 288 by 384, are
# multiples of a matmul's tile, 12 by 32.
LOW = 32, 128 if AMD else 288
HEADS = 4  # pieces for each thread, since heads and rows take different times

# ---- Threads: `program`, `eager` ----

WORTH = 4096  # elements of a simple loop from which on threads pay: about a microsecond
LONG = 1_000  # pauses after which a waiting thread yields its core to a thread that has none
# Pauses after which a waiting thread takes a piece of another thread. The piece's data are probably
# in the other core's cache.
GRACE = 4_000
LEAST = 1 << 14  # least elements of an op's arguments: a call takes some 50 us of Python
