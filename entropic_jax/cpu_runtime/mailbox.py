"""The board on which a kernel publishes its work for the threads that help: what stands where."""

BOARD = "entropic_board"  # its symbol
SIZE = 512  # bytes
JOB, FUNCTION, ARGUMENT, DONE, BUSY, THREADS = (64 * i for i in range(6))  # bytes: a cache line for each
