# SPDX-License-Identifier: Apache-2.0
"""What this machine is (``facts``), how that is read (``reading``), and what the matrix says of it (``rules``).

Neither torch nor Megatron is imported, and no CUDA context is made: reading must be safe beside a running job, and
before a fork.
"""
