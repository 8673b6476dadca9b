"""Every figure that is tuned to a processor or measured on one, in one table.

Measured on Zen 3 and 4 (`AMD`), and on Sapphire and Granite Rapids for all others. A figure that
only follows from the size of a cache or of an array is stored where it is used.
"""

from __future__ import annotations

import llvmlite.binding

AMD = llvmlite.binding.get_host_cpu_name().startswith("znver")

# ---- Products of matrices: `registers`, `tile` ----

# Numbers of a row of a panel, at most. Half as many let w's panels stay in an L2 cache of 2 MB, and
# one of each factor in an L1 cache of 48 KB: on Intel's cores products of several hundred rows take
# 5 to 25 % less time.
DEPTH = 512 if AMD else 256
SLOT = 16 if AMD else 0  # from row to row of a panel copied column by column; 0: its height
# What is not copied: where it lies in so many bytes, or is read for so few rows or columns only.
# A core that multiplies twice as many numbers a second waits for what is not side by side.
NEAR, FEW_ROWS, FEW_COLUMNS = (1 << 19, 192, 192) if AMD else (0, 0, 64)
GROUP = 1 if AMD else 8  # panels of w by rows that are copied at once, from long pieces of rows

# ---- Products of vectors: `vectors`, `kernels/gemm` ----

TOGETHER = (
    not AMD
)  # whether several rows are read at once: AMD's cores read one by one twice as fast
VECTORS = 4  # rows at most that are multiplied one by one
LARGE = 1 << 16  # weights that are worth to be cut by rows: 2 to 3 times as fast as by columns
# Weights of a piece that are worth it, and pieces for each thread, of which a late one has fewer.
SHARE, SHARES = 1 << 14, 4
SMALL = 1_000_000  # multiplications: OpenBLAS has loops for these that copy neither factor
ALONE = 1 << 18  # multiplications: of more OpenBLAS makes a job for its own threads
SPEED = 16  # multiplications in the time of an element of a simple loop

# ---- Attention: `flash`, `kernels/sdpa` ----

# Keys of a tile that, but for the first, not all of its queries see: queries that see none of them
# skip it. 0: as many as of other tiles.
NARROW = 0 if AMD else 96
COLUMNS, WIDE = 256 if AMD else 384, 1024  # keys of a tile, and of one that has them all, at most
# Queries of a tile where some see less than others: fewer in short texts, since half of a tile on
# the diagonal is for nothing. Tiles of long texts are multiples of a product's, 12 by 32.
LOW = 32, 128 if AMD else 288
HEADS = 4  # pieces for each thread: heads and rows differ in what they see

# ---- Threads: `program`, `eager` ----

WORTH = 4096  # elements of one simple loop that are worth a thread: about a microsecond
LONG = 1_000  # pauses of a thread that waits: then the other one may have no core
GRACE = 4_000  # pauses before a piece is taken from its thread, which has its share of memory near
LEAST = (
    1 << 14
)  # elements of all arguments of an op: a call of a program takes some 50 us of Python
