# SPDX-License-Identifier: Apache-2.0
"""The command line, one file a command. Imports pure rooms only: what needs torch is started as a process."""
