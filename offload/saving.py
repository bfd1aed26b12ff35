"""Commits a run between steps, and goes back to what was committed.

Note [Saving]
What is at home on nvme is there already: a commit names it. What is at home in memory is written to its extents
first, one chunk or part of a weight plane after the other, at most `durability.write_bytes_per_second` (`keeping`).
What is saved is the state at the call: training waits for it, or, in the background, the next update does, since with
two generations there is no third extent for what is at home on nvme. With it go the training state
(`training_state`) and its tensors, written at the call.
A checkpoint in another place is written from the engine, while training waits, or in the background from a commit
that is made for it (`portable.background`): the next commit then waits for the copy, as there is no third generation.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from .config.schema import Aio, Durability
from .engine import OffloadEngine
from .errors import CheckpointError, ConfigError, OffloadError, TransferError
from .homes import fetch_home
from .keeping import BegunCommit, Keeping
from .ledger import Ledger
from .models.pretrained import config_of
from .pipeline import NvmeStates, ResidentStates
from .portable.background import BackgroundSaving
from .portable.commit import CommitFiles
from .portable.load import load, match
from .portable.save import Content, Destination, LiveState, Saving
from .portable.saved import TensorsOf
from .resuming import find_target, has_manifest, open_saved, read_training, shapes_for
from .store.commits import find_commits
from .store.manifest import Shapes
from .store.swap import SwapStore
from .store.tensors import Tensors
from .training_state import Stateful, TrainingState, capture, check_engine, restore, restore_part
from .weights import HostSlots, StreamedWeights


class SavedEngine(OffloadEngine):
    """An engine whose state can be committed and gone on from. See Note [Saving]."""

    def __init__(
        self,
        *args: Any,
        model: nn.Module,
        roots: tuple[str, ...],
        aio: Aio,
        durability: Durability,
        going_on: TrainingState | None = None,
        **more: Any,
    ) -> None:
        """
        Args:
            model: whose buffers are saved.
            roots: the swap paths, where commits are looked for.
            aio: how another run's swap files are opened.
            going_on: what the store was opened from, already held against the model; :meth:`take_over` takes it.
        """
        self._model: nn.Module | None = model
        self._roots, self._aio, self._durability = roots, aio, durability
        self._parts: dict[str, Stateful] = {}
        self._going_on: TrainingState | None = None
        self._before = (0, 0)  # steps applied, and refused, that the ledger does not count
        self._kept: deque[str | None] = deque(maxlen=2)  # files of tensors of the last commits
        self._background: BackgroundSaving | None = None
        self._begun: BegunCommit | None = None
        super().__init__(*args, **more)
        self.before_change = self._end_commit
        if going_on is not None:
            self._going_on = going_on

    # -- what is known ------------------------------------------------------------------------------------

    @property
    def global_steps(self) -> int:
        """Steps that were applied, over all processes of the run."""
        return self._before[0] + self.ledger.steps

    @property
    def skipped_steps(self) -> int:
        """Steps that were refused because a gradient was not finite, over all processes of the run."""
        return self._before[1] + self.ledger.skipped_steps

    @property
    def client_state(self) -> dict[str, Any]:
        """What the user gave with the commit that the run goes on from; empty where it is a new one."""
        return {} if self._going_on is None else self._going_on.client_state

    @property
    def commits_to(self) -> Path | None:
        """The swap directory that keeps commits; None where there is one generation, or no store."""
        keeps = self._store is not None and self.plan.placement.generations == 2
        return self._store.path if self._store is not None and keeps else None

    @property
    def commit_serial(self) -> int:
        """The number of the last commit; 0 where nothing has been committed."""
        return 0 if self._store is None else self._store.serial

    def attach(self, **parts: Stateful) -> None:
        """Saves objects with the engine, under their names: a scheduler, a dataset, whatever has ``state_dict()``.

        On an engine that goes on from a commit each is given at once what it had then (``load_state_dict``).

        Raises:
            CheckpointError: what was saved under that name does not fit it.
        """
        for name, part in parts.items():
            self._parts[name] = part
            if self._going_on is not None:
                restore_part(self, self._going_on, name, part)

    def report(self) -> Ledger:
        """The ledger, complete: everything in flight has arrived."""
        ledger = super().report()
        goes_on = self._before[0] + ledger.steps > ledger.steps
        ledger.predicted = self.plan.bytes_moved(ledger.steps, goes_on=goes_on)
        return ledger

    def begin_backward(self) -> bool:
        if self.plan.placement.update == "backward" and not self._in_backward:
            self.before_change()
        return super().begin_backward()

    def step(self) -> bool:
        self.before_change()
        return super().step()

    def poll(self) -> None:
        super().poll()
        if self._begun is not None:
            self._begun.advance()

    def settle(self) -> None:
        super().settle()
        self._end_commit()

    def close(self) -> None:
        """As :meth:`OffloadEngine.close`. A swap directory in which something was committed stays.

        What is saved in the background is waited for, and what went wrong with it is raised when all is closed. Ctrl-C
        meanwhile gives it up.
        """
        try:
            if self._background is not None:
                self._background.wait(or_cancel=True)
        finally:
            try:
                if self.is_open and self._failure is None and os.getpid() == self._owner_pid:
                    self.before_change()
            finally:
                super().close()
                self._model = None
                self._parts.clear()
                self._going_on = None
        self.wait_for_checkpoint()

    def discard(self) -> None:
        """As :meth:`close`, and what was committed is removed too.

        Raises:
            StoreError: a checkpoint could not be saved in the background; nothing has been removed then.
        """
        self.wait_for_checkpoint()
        self.settle()
        if self._store is not None:
            self._store.discard()
        self.close()

    # -- saving -------------------------------------------------------------------------------------------

    def save_checkpoint(
        self,
        dir: str | Path | None = None,  # noqa: A002  (DeepSpeed's name)
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        *,
        exclude_frozen: bool = False,
        keep_last: int | None = None,
        latest: bool = True,
        background: bool = False,
    ) -> Path:
        """Makes the state after the last step what the next start goes on from. See Note [Saving].

        Gradients that wait for their step are saved too. Returns when all is on stable storage, unless it is saved
        in the background. The next saving waits for that, as do loading and closing, and so does
        :meth:`wait_for_checkpoint`. What goes wrong is logged, and raised by the first of them but loading.

        Args:
            dir: None, or within the swap path: the store is committed, and no plane on nvme is written again.
                Elsewhere a checkpoint is written to ``dir/tag``, which every placement can load.
            tag: a name for it; for a checkpoint ``global_stepN`` by default.
            client_state: JSON, which :attr:`client_state` gives back.
            exclude_frozen: of a checkpoint, leave out frozen weights; loading then needs the same base.
            keep_last: of checkpoints, so many stay in ``dir``.
            latest: of a checkpoint, make it the one that is loaded where no tag is given.
            background: of a checkpoint, commit the store, and copy the commit while training goes on; that needs
                ``durability.generations`` 2. Of a commit, write state that is at home in memory while the next forward
                and backward run: the commit is made before the next update, which raises what goes wrong with it.

        Returns:
            The directory.

        Raises:
            ConfigError: there is nothing to commit to, or ``client_state`` is not JSON.
            StoreError: it could not be written; the commit before stands, and training may go on. Or that is how
                the saving before, in the background, has ended: nothing else was done.
            OffloadError: a step is half done; call it after ``optimizer.step()``.
            TransferError: a write has failed for good: the engine stops; the commit before stands.
        """
        self.wait_for_checkpoint()
        with self._guard():
            self._refuse_half_a_step("saved")
            state = self._capture(tag, client_state)
            if dir is None or self.is_in_swap_path(Path(dir)):
                store = self._committing_store()
                begun = self._begin_commit(store, state)
                if background:
                    self._begun = begun
                else:
                    begun.end(self._shapes)
                return store.path
            to = Destination(
                directory=Path(os.path.abspath(os.path.expanduser(dir))),
                tag=f"global_step{state.step}" if tag is None else tag,
                exclude_frozen=exclude_frozen,
                keep_last=keep_last,
                latest=latest,
            )
            content = Content(state.step, state.values, config_of(self._owned_model()) or {})
            if background:
                return self._save_in_background(state, content, to)
            with Saving(LiveState(self, state.tensors), content, to) as saving:
                return saving.write()

    def _save_in_background(self, state: TrainingState, content: Content, to: Destination) -> Path:
        store = self._committing_store("leave background=True out")
        self._background = BackgroundSaving(
            store.path,
            self._begin_commit(store, state).end(self._shapes),
            self._aio,
            content,
            to,
            bytes_per_second=self._durability.write_bytes_per_second,
        )
        self._background.start()
        return self._background.folder

    @property
    def is_saving(self) -> bool:
        """Whether a commit or a checkpoint is being written in the background."""
        is_running = self._background is not None and self._background.is_running
        return is_running or (self._begun is not None and os.getpid() == self._owner_pid)

    def wait_for_checkpoint(self) -> None:
        """Returns when what is saved in the background is whole and on stable storage, or nothing is.

        Raises:
            StoreError: it could not be written; what was there before stands, and training may go on. Raised once.
            TransferError: of a commit, a write has failed for good: the engine stops; the commit before stands.
        """
        self._end_commit()
        if self._background is not None:
            self._background.wait()
            if (failure := self._background.take_failure()) is not None:
                raise failure

    def _capture(self, tag: str | None, client_state: Mapping[str, Any] | None) -> TrainingState:
        return capture(
            self,
            self._owned_model(),
            step=self.global_steps,
            skipped_steps=self.skipped_steps,
            parts=self._parts,
            client_state=client_state,
            tag=tag,
        )

    @cached_property
    def _shapes(self) -> Shapes:
        """What a commit says of model and plan: the same in every commit of a run."""
        return shapes_for(self.partition, self.plan)

    def _begin_commit(self, store: SwapStore, state: TrainingState) -> BegunCommit:
        self.settle_updates()
        rate = self._durability.write_bytes_per_second
        keeping = Keeping(self.plan, self.weights, self._states, store, bytes_per_second=rate)
        return BegunCommit(store, keeping, state, self._kept)

    def _end_commit(self) -> None:
        """Makes the commit that was begun in the background, if one was: here or never."""
        begun, self._begun = self._begun, None
        if begun is not None and os.getpid() == self._owner_pid:
            with self._guard():
                begun.end(self._shapes)

    def _committing_store(self, otherwise: str = "give a directory elsewhere") -> SwapStore:
        if self._store is None:
            raise ConfigError(
                "save_checkpoint: nothing is on nvme, so there is nothing to commit to; set durability.generations"
                f" = 2 and an nvme_path, or {otherwise}"
            )
        if self.plan.placement.generations != 2:
            raise ConfigError(
                "save_checkpoint: the swap files keep one generation, so nothing can be committed; set"
                f" durability.generations = 2, or {otherwise}"
            )
        return self._store

    def is_in_swap_path(self, path: Path) -> bool:
        """Whether a path lies within the swap paths."""
        wanted = path.expanduser().absolute()
        return any(wanted.is_relative_to(Path(root).expanduser().absolute()) for root in self._roots)

    def _refuse_half_a_step(self, what: str) -> None:
        self.close_abandoned()
        if self._in_backward or self._updated:
            raise OffloadError(
                f"in the midst of a step nothing can be {what}: call optimizer.step() first, or, where an exception"
                " has ended a backward, begin the next forward"
            )
        names = [stored.name for stored in self.partition.of_param.values() if stored.gathered is not None]
        if names:
            raise OffloadError(
                f"inside gather nothing can be {what}: {names[0]} may have changed; leave it first"
            )

    def _owned_model(self) -> nn.Module:
        if self._model is None:
            raise OffloadError("the engine is closed")
        return self._model

    # -- going on -----------------------------------------------------------------------------------------

    def take_over(self) -> None:
        """Makes everything beside the planes what it was at the commit that the store was opened from, or closes."""
        if self._going_on is None:
            return
        try:
            self._restore(self._going_on)
        except BaseException:
            self.close()
            raise

    def load_checkpoint(
        self,
        dir: str | Path | None = None,  # noqa: A002  (DeepSpeed's name)
        tag: str | None = None,
        *,
        strict: bool = True,
        weights_only: bool = False,
    ) -> tuple[str, dict[str, Any]]:
        """Goes back to a commit: this run's last one, or that of a run that has ended, whose store becomes ours.

        Or takes over the values of a checkpoint, or of a commit that does not fit as it is: whatever the placement,
        chunks and formats that they were saved from.

        Args:
            dir: a swap directory, or a swap path, as :func:`offload.prepare` takes for ``resume``; None: this run's
                own last commit, or else the newest on the configuration's swap paths. Or a directory of checkpoints.
            tag: what the commit has to be called; which checkpoint, the latest by default.
            strict: of a checkpoint, refuse it where a parameter is missing there or here. Else weights that are on
                both sides are taken over, and nothing else unless all are.
            weights_only: of a checkpoint, take nothing but weights.

        Returns:
            The directory, and the ``client_state`` that was saved.

        Raises:
            CheckpointError: there is none, or one of another model; nothing has changed then.
            StoreError: another run has it.
            TransferError: it is damaged; where that was found too late, the engine has stopped.
        """
        if self._background is not None:
            self._background.wait()
        self._end_commit()
        with self._guard():
            self._refuse_half_a_step("loaded")
            own, is_whole = self._store, strict and not weights_only
            if own is not None and own.serial and (dir is None or self._holds_own(own, Path(dir))):
                if not is_whole:
                    raise ConfigError("load_checkpoint: this run's own commit is gone back to as a whole")
                state = self._go_back(own, tag)
            elif dir is None or (self._is_commit(Path(dir)) and is_whole and self._can_adopt(dir, tag)):
                state = self._adopt(True if dir is None else dir, tag)
            else:
                return self._copy(Path(dir), tag, strict=strict, weights_only=weights_only)
            self._restore(state)
            return str(self._committing_store().path), state.client_state

    def _can_adopt(self, where: Any, tag: str | None) -> bool:
        """Whether a store can become ours as it is. Else it is copied, where that is possible."""
        if not has_manifest(Path(where).expanduser()):
            return True  # it is a path with several: who adopts says what is wrong with them
        try:
            plan = find_target(
                where, self._roots, self.partition, self.plan.placement, self.plan.inventory, tag=tag
            ).plan
        except CheckpointError:
            return False
        return self.commits_to is not None and plan.chunk_elements == self.plan.chunk_elements

    def _copy(
        self, root: Path, tag: str | None, *, strict: bool, weights_only: bool
    ) -> tuple[str, dict[str, Any]]:
        """Takes over the values of a checkpoint, or of the commit of a run that has ended."""
        with open_saved(root.expanduser(), tag) as saved:
            try:
                state = TrainingState.of(saved.training, TensorsOf(saved))
                if isinstance(saved, CommitFiles) and tag is not None and state.tag != tag:
                    raise CheckpointError(f"its commit is called {state.tag!a}, not {tag!a}")
                matched = match(self, saved, strict=strict, weights_only=weights_only)
                if matched.is_whole:
                    check_engine(self, self._owned_model(), state)
            except (CheckpointError, TransferError) as error:  # nothing has changed yet: the engine goes on
                raise CheckpointError(f"{saved.where}: {error}") from None
            self._empty()
            load(self, saved, matched)
            if matched.is_whole:
                self._restore(state, is_committed=False)
            return str(saved.where), state.client_state

    def _holds_own(self, store: SwapStore, path: Path) -> bool:
        wanted = path.expanduser().absolute()
        return wanted in (store.path, store.path.parent)

    def _is_commit(self, path: Path) -> bool:
        return self.is_in_swap_path(path) or has_manifest(path.expanduser())

    def _go_back(self, store: SwapStore, tag: str | None) -> TrainingState:
        manifest = find_commits(store.path).newest
        state = read_training(store.path, manifest)
        if tag is not None and state.tag != tag:
            raise CheckpointError(f"{store.path}: its commit is called {state.tag!a}, not {tag!a}")
        check_engine(self, self._owned_model(), state)
        self._empty()
        store.restore(manifest)
        self._fetch(store)
        return state

    def _adopt(self, where: Any, tag: str | None) -> TrainingState:
        """Another run's store becomes ours, and ours goes."""
        own = self._committing_store()
        placement, inventory = self.plan.placement, self.plan.inventory
        target = find_target(where, self._roots, self.partition, placement, inventory, tag=tag)
        if target.plan.chunk_elements != self.plan.chunk_elements:
            raise CheckpointError(
                f"{target.directory}: its chunks have {target.plan.chunk_elements} elements, and those of this plan"
                f" {self.plan.chunk_elements}; say resume={str(target.directory)!r} when the model is prepared"
            )
        store, state = target.open(self._aio, self._durability, self.ledger)
        try:
            check_engine(self, self._owned_model(), state)
        except BaseException:
            store.close()
            raise
        self._empty()
        self._store = store
        for home in (self._states, self.weights.host if isinstance(self.weights, StreamedWeights) else None):
            if isinstance(home, (NvmeStates, HostSlots)):
                home.swap = store
        own.close()
        self._fetch(store)
        return state

    def _empty(self) -> None:
        """Nothing is in flight, and nothing waits."""
        self.before_change()
        self.settle_updates()
        self.pipeline.cancel_announced()
        self.weights.settle()

    def _fetch(self, store: SwapStore) -> None:
        for unit in range(len(self.plan.inventory.units)):
            self._versions[unit] += 1
            if isinstance(self.weights, StreamedWeights):
                self.weights.mover.begin_change(unit)
            fetch_home(self.plan, unit, self.weights, self._states, store)
            if isinstance(self.weights, StreamedWeights):
                self.weights.mover.end_change(unit)
        if isinstance(self.weights, StreamedWeights):
            self.weights.mover.reload()

    def _restore(self, state: TrainingState, *, is_committed: bool = True) -> None:
        restore(self, self._owned_model(), state, self._parts)
        self._going_on = state
        if isinstance(state.tensors, Tensors):
            self._kept.append(state.tensors.file)
        self._before = (state.step - self.ledger.steps, state.skipped_steps - self.ledger.skipped_steps)
        if is_committed and isinstance(self._states, ResidentStates):
            self._states.changed.clear()
