# SPDX-License-Identifier: Apache-2.0
"""What a release consists of, and how anyone checks one: archives, sums, MANIFEST, signature, provenance, SBOM.

Pure but for ``signature``, which runs ssh-keygen, and ``folder``, which reads files. ``scripts/build_release.py``
makes releases of these parts; ``megatron-fixes verify`` checks them with the same ones. Not handled: publishing.
"""
