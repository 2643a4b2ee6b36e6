# SPDX-License-Identifier: Apache-2.0
"""What the overlay knows and does in one process: decides once a tree, loads patched copies, keeps what it refused.

A touched module goes through these steps, and the first that fails leaves it unpatched, with a refusal:

1. the original is found by the finders behind ours, so editable installs and wrapping finders keep their say;
2. its loader must load a source file as Python does (``loader.oddity``), from the place that the tables name;
3. the packages above it lie in the same tree;
4. the tree's decision, from the cache or by ``rules``, puts something into its file.

Called back by a finder that we asked (wrapt does so), we ask only finders that are not being asked already; the spec
made then goes out through that finder, with whatever it wraps around our loader. This is per thread. Decisions are
made under a lock, which a forked child gets anew.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from dataclasses import dataclass
from importlib.util import spec_from_file_location

from megatron_fixes import config
from megatron_fixes.overlay import hardware, notice
from megatron_fixes.overlay.decision import Decision, Refusal
from megatron_fixes.overlay.loader import Copy, oddity, stand_in
from megatron_fixes.overlay.store import Entry, Store, UnusableError
from megatron_fixes.overlay.tables import ids_of, load_tables
from megatron_fixes.overlay.tree import PACKAGE_INFO, Tree, in_two_places

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

CORE_FILE = "megatron/core/__init__.py"


@dataclass(frozen=True)
class Held:
    """A tree's decision with the patched texts; ``stored`` if they lie in the cache under the key."""

    key: str
    decision: Decision
    texts: dict[str, bytes]
    stored: bool


class Process:
    """See the module's docstring.

    Attributes:
        paths: Dotted name of every touched module to its file below a root.
        unaccounted: Touched modules of which it isn't known yet how they were loaded.
        decisions: Root to what was decided for it.
        refusals: Everything refused so far.
        cache_problem: Why the cache is not used, or empty.
        to_stop: Whether strict mode found something where it may not stop; the next import does.
    """

    def __init__(self, settings: config.OverlaySettings | None, finder: object) -> None:
        self._finder = finder
        self.settings = settings or config.overlay_settings()
        self.tables = load_tables()
        self.asked = ids_of(self.settings.fixes.value, self.tables)
        self.paths = self.tables.paths if self.asked else {}
        self.unaccounted = set(self.paths)
        self.decisions: dict[str, Held] = {}
        self.refusals: list[Refusal] = []
        self.cache_problem = ""
        self.to_stop = False
        self._machine_seen = False
        self._store = Store(self.settings.cache.value)
        self._copies: dict[str, Copy] = {}
        self._left: set[str] = set()
        self._asking = threading.local()
        self._lock = threading.RLock()
        os.register_at_fork(after_in_child=self._renew_lock)
        for setting in self.settings.all():
            if setting.problem:
                notice.say(f"{setting.name}: {setting.problem}")

    def _renew_lock(self) -> None:
        self._lock = threading.RLock()

    def find(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        """Find a touched module: the patched copy, or the original where there is nothing to put in."""
        spec = self._ask_the_rest(fullname, path, target)
        if spec is None or spec.origin in self._copies:
            return spec
        made = None
        try:
            made = self._overlaid(fullname, spec)
        except Exception as error:  # noqa: BLE001 - our bug must not become an ImportError that Megatron swallows
            self.refuse(_bug(fullname, error))
        if made is None:
            self._left.add(fullname)
            return spec
        return made

    def _ask_the_rest(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        asking: list[object] = self._asking.__dict__.setdefault(fullname, [])
        finders = list(sys.meta_path)
        places = [place for place, other in enumerate(finders) if other is self._finder]
        for other in finders[places[0] + 1 :] if places else finders:
            if any(other is busy for busy in asking) or not hasattr(other, "find_spec"):
                continue
            asking.append(other)
            try:
                spec = other.find_spec(fullname, path, target)
            finally:
                asking.pop()
            if spec is not None:
                return spec
        return None

    def _overlaid(self, fullname: str, spec: ModuleSpec) -> ModuleSpec | None:
        path = self.paths[fullname]
        why = oddity(spec.loader)
        root = self._root(spec.origin, path)
        if not why and root is None:
            why = f"it lies at {spec.origin}, expected a path that ends with {path}"
        if why or root is None:
            self.refuse(_odd(fullname, why))
            return None
        held = self.decide(root)
        self.refuse(*held.decision.refusals)
        fixes = held.decision.files.get(path)
        if fixes is None:
            return None
        packages = {name: getattr(module, "__path__", ()) for name, module in _loaded(_parents(fullname)).items()}
        if place := in_two_places(root, fullname, packages):
            self.refuse(_two_places(fullname, fixes, place))
            return None
        origin = os.path.join(root, path)
        entry = (self._store, held.key, path) if held.stored else None
        name = self._store.path(held.key, path) if held.stored else f"{origin}+{'+'.join(fixes)}"
        copy = Copy(name, held.texts[path], origin, fixes, entry)
        loader = stand_in(spec.loader, copy)  # type: ignore[arg-type]
        made = spec_from_file_location(
            fullname, name, loader=loader, submodule_search_locations=spec.submodule_search_locations
        )
        self._copies[name] = copy
        return made

    @staticmethod
    def _root(origin: str | None, path: str) -> str | None:
        if origin is None:
            return None
        whole = os.path.abspath(origin)
        return whole[: -len(path) - 1] or "/" if whole.endswith(os.sep + path) else None

    def prepare(self, origin: str | None) -> None:
        """Decide for the tree of a ``megatron.core``, so that nothing is left to import when its modules are found.

        What goes wrong is told when a touched module is found, and then again if need be.
        """
        root = self._root(origin, CORE_FILE)
        if self.paths and root is not None:
            with contextlib.suppress(Exception):
                self.decide(root)
            with contextlib.suppress(Exception):
                self._look_at_machine()

    def _look_at_machine(self) -> None:
        """Say once per node what can't work on it; in strict mode every process looks, as each one stops by itself."""
        if not self._machine_seen and (self.settings.strict.value or not notice.local_rank()):
            self._machine_seen = True
            self.refuse(*hardware.refusals())

    def decide(self, root: str) -> Held:
        """What goes into a tree; decided again only if its files changed.

        Raises:
            OSError: A touched file can't be read.
            MegatronFixesError: The distribution is damaged.
        """
        tree = Tree(root, self.paths.values())
        key = tree.key(self.asked, self.tables.digest)
        held = self.decisions.get(root)
        if held is None or held.key != key:
            held = self._recall(key)
            if held is None:
                # Before the lock is taken: nothing may be imported while another thread waits for it.
                _import_what_deciding_takes()
                with self._lock:
                    held = self._decide(tree, key)
            self.decisions[root] = held
        return held

    def _recall(self, key: str) -> Held | None:
        try:
            entry = self._store.read(key)
            return None if entry is None else Held(key, Decision.from_json(entry.decision), entry.texts, stored=True)
        except UnusableError as error:
            if error.foreign:
                self._work_from_memory(error)
        except (ValueError, TypeError, KeyError):
            return None
        return None

    def _decide(self, tree: Tree, key: str) -> Held:
        from megatron_fixes import catalog

        decision, texts = tree.decide(catalog.load(compiled=True), self.asked)
        stored = False
        if decision.release_source == PACKAGE_INFO and not self.cache_problem:
            try:
                self._store.write(key, Entry(decision.to_json(), texts))
                stored = True
            except UnusableError as error:
                self._work_from_memory(error)
        return Held(key, decision, texts, stored)

    def _work_from_memory(self, error: UnusableError) -> None:
        folder = self._store.folder
        self.cache_problem = error.message
        if error.foreign:
            message = f"the cache folder {folder} is not used: {error.message}"
            hint = "remove it, or point MEGATRON_FIXES_CACHE at a folder of your own"
            self.refuse(Refusal("cache-not-ours", message, hint))
        else:
            what = f"the cache folder {folder} can't be used" if folder else "there is no cache"
            notice.say(
                f"{what} ({error.message}): patched in memory, which costs time at each start; point "
                "MEGATRON_FIXES_CACHE at a folder that can be written to"
            )

    def account(self, *, stop: bool = True) -> None:
        """Notice touched modules that were loaded without us; a lookup each, so that every import can ask."""
        for name, module in _loaded(tuple(self.unaccounted)).items():
            # First, as deciding imports what asks us again.
            self.unaccounted.discard(name)
            if name not in self._left and not self.is_ours(module):
                self._refuse_loaded(name, module, "bypassed", stop=stop)
        if self.to_stop and stop:
            notice.stop(self.refusals)

    def find_early_modules(self) -> None:
        """Refuse touched modules that were imported before the finder was there."""
        for name, module in _loaded(tuple(self.unaccounted)).items():
            self.unaccounted.discard(name)
            if not self.is_ours(module):
                self._refuse_loaded(name, module, "too-early", stop=True)

    def is_ours(self, module: ModuleType) -> bool:
        """Whether a module was, or is being, loaded from a patched copy."""
        return getattr(module.__spec__, "origin", None) in self._copies

    def _refuse_loaded(self, name: str, module: ModuleType, kind: str, *, stop: bool) -> None:
        """Refuse a module that is loaded unpatched, if anything would have been put into it."""
        origin = getattr(module.__spec__, "origin", None) or getattr(module, "__file__", None)
        root = self._root(origin, self.paths[name])
        if root is None:
            self.refuse(_odd(name, f"it was loaded from {origin}"), stop=stop)
            return
        try:
            decision = self.decide(root).decision
        except Exception as error:  # noqa: BLE001 - as in find
            self.refuse(_bug(name, error), stop=stop)
            return
        fixes = decision.files.get(self.paths[name])
        found = [*decision.refusals]
        if fixes and kind == "too-early":
            found.append(_too_early(name, fixes))
        elif fixes:
            found.append(_bypassed(name, fixes, finders_before(self._finder)))
        self.refuse(*found, stop=stop)

    def refuse(self, *refusals: Refusal, stop: bool = True) -> None:
        """Keep and say what can't be had, each once; in strict mode end the process unless ``stop`` is False."""
        for refusal in refusals:
            if refusal not in self.refusals:
                self.refusals.append(refusal)
                notice.say(refusal.line)
        if self.settings.strict.value and self.refusals:
            self.to_stop = True
            if stop:
                notice.stop(self.refusals)


def _import_what_deciding_takes() -> None:
    """Import every module that ``_decide`` uses."""
    import megatron_fixes.catalog
    import megatron_fixes.overlay.rules
    import megatron_fixes.patching.gitfiles
    import megatron_fixes.patching.release  # noqa: F401


def finders_before(finder: object) -> list[str]:
    """Names of the finders that Python asks before ours; all of them if ours is not there."""
    names = []
    for other in sys.meta_path:
        if other is finder:
            break
        kind = other if isinstance(other, type) else type(other)
        names.append(f"{kind.__module__}.{kind.__qualname__}")
    return names


def _parents(name: str) -> tuple[str, ...]:
    parts = name.split(".")
    return tuple(".".join(parts[:end]) for end in range(1, len(parts)))


def _loaded(names: Sequence[str]) -> dict[str, ModuleType]:
    return {name: module for name in names if (module := sys.modules.get(name)) is not None}


def _lost(fixes: Sequence[str]) -> str:
    return f"{', '.join(fixes)} {'is' if len(fixes) == 1 else 'are'} not in force"


def _too_early(name: str, fixes: Sequence[str]) -> Refusal:
    message = f"{_lost(fixes)}: {name} was imported before the overlay was installed"
    return Refusal("too-early", message, "import megatron_fixes.auto before anything of Megatron", module=name)


def _bypassed(name: str, fixes: Sequence[str], finders: Sequence[str]) -> Refusal:
    before = ", ".join(finders) or "a finder that is gone by now"
    message = f"{_lost(fixes)}: {name} was loaded by another import hook, put in front of ours ({before})"
    hint = "remove that hook, or import megatron_fixes.auto after it is put in"
    return Refusal("bypassed", message, hint, module=name)


def _two_places(name: str, fixes: Sequence[str], place: str) -> Refusal:
    message = f"{_lost(fixes)}: Megatron is half in two places, {place}"
    return Refusal("two-places", message, "leave one of them on the import path", module=name)


def _odd(name: str, why: str) -> Refusal:
    message = f"nothing was put into {name}: {why}"
    return Refusal("odd-loader", message, "install megatron-core unpacked, with its .py files", module=name)


def _bug(name: str, error: Exception) -> Refusal:
    message = f"nothing was put into {name}: {type(error).__name__}: {error}"
    return Refusal("bug", message.replace("\n", " "), "report this as a bug of megatron-fixes", module=name)
