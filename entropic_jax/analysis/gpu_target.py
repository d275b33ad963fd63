"""Description of NVIDIA GPUs of compute capability 9.0, from which XLA compiles for them without one."""

from entropic_jax.state.ledger import HARDWARE

from .chips import Chip

# The fields are those of XLA's GpuTargetConfigProto; the figures are published ones of the chip and of its
# compute capability. The three that differ between an H100 and an H200 (SXM) are inserted.
TARGET = """
device_description_str: "NVIDIA {name}"
platform_name: "CUDA"
runtime_version {{ major: 13 minor: 0 patch: 0 }}
dnn_version_info {{ major: 9 minor: 10 }}
gpu_device_info {{
  cuda_compute_capability {{ major: 9 minor: 0 }}
  # The chip.
  core_count: 132
  fpus_per_core: 128
  clock_rate_ghz: 1.98
  l2_cache_size: 52428800
  device_memory_size: {memory}
  memory_bandwidth: {bandwidth}
  # Threads and registers.
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  # Shared memory: by default, at most by request, and in all.
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
}}
"""


def described(chip: Chip) -> str:
    """The target configuration of a GPU of `chips.CHIPS`, as text of its protocol buffer."""
    bandwidth = int(HARDWARE[chip.hardware].bandwidth)
    return TARGET.format(name=chip.hardware.upper(), memory=chip.memory, bandwidth=bandwidth)
