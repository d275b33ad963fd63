"""Mailbox of the thread pool: the layout of the memory through which a kernel hands work to the threads."""

MAILBOX = "entropic_mailbox"  # the symbol under which kernels find it
SIZE = 512  # bytes
# Offsets in bytes, each word in a cache line of its own:
JOB = 0  # generation << 32 | chunks that nobody has taken yet
FUNCTION = 64  # address of the task
ARGUMENT = 128  # what the task is called with, besides the number of a chunk
DONE = 192  # chunks that are finished
BUSY = 256  # 1 while a kernel uses the pool
THREADS = 320  # number of threads, the caller's included; 1 tells the others to end
