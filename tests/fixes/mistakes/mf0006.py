# SPDX-License-Identifier: Apache-2.0
"""Mistakes that the patch of MF0006 could have: file, what is right in it, what is wrong."""

OPTIMIZER = "megatron/core/optimizer/optimizer.py"
FOUND = "                found_inf_flag |= optimizer.prepare_grads()\n"
UPDATE = "            scaler.update(found_inf_flag)\n"
LOWEST = "min(state[key] for state in states)"

MISTAKES = {
    "counts an overflow only if all have one": (
        OPTIMIZER,
        FOUND,
        "                one = optimizer.prepare_grads()\n"
        "                found_inf_flag = one and (found_inf_flag or optimizer is self.chained_optimizers[0])\n",
    ),
    "counts the last overflow only": (OPTIMIZER, FOUND, FOUND.replace("|=", "=")),
    "updates twice": (OPTIMIZER, UPDATE, UPDATE + UPDATE),
    "updates never": (OPTIMIZER, UPDATE, "            pass\n"),
    "updates the first only": (
        OPTIMIZER,
        "        for scaler in scalers:\n" + UPDATE,
        "        for scaler in scalers[:1]:\n" + UPDATE,
    ),
    "updates a shared one twice": (OPTIMIZER, "elif self.grad_scaler not in waiting:", "else:"),
    "updates while others still unscale": (
        OPTIMIZER,
        "                waiting.append(self.grad_scaler)\n",
        "                waiting.append(self.grad_scaler)\n                self.grad_scaler.update(found_inf_flag)\n",
    ),
    "does not let go of an optimizer": (
        OPTIMIZER,
        "                optimizer.scalers_waiting_for_update = None\n",
        "                pass\n",
    ),
    "lets go only after a good step": (
        OPTIMIZER,
        "            finally:\n                optimizer.scalers_waiting_for_update = None\n",
        "            except ZeroDivisionError:\n                raise\n"
        "            else:\n                optimizer.scalers_waiting_for_update = None\n",
    ),
    "loads the highest": (OPTIMIZER, LOWEST, LOWEST.replace("min", "max")),
    "loads the first": (OPTIMIZER, LOWEST, "states[0][key]"),
    "loads the last": (OPTIMIZER, LOWEST, "states[-1][key]"),
    "loads one scale and several counts": (
        OPTIMIZER,
        "for key in states[0]})",
        "for key in ['scale']} | {k: v for k, v in scaler.state_dict().items() if k != 'scale'})",
    ),
    "loads into the first only": (
        OPTIMIZER,
        "        for scaler in scalers:\n            scaler.load",
        "        for scaler in scalers[:1]:\n            scaler.load",
    ),
}
