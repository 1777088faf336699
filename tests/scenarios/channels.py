"""Who holds the port of one channel, as its home counts.

open home                  `home` opens the channel and holds the first unit
sent a 1 b                 the news that `a` is about to send a message with a port to `b`: its transit number 1
took a 1 b                 the news that it has come
drops b                    the last port of `b` is gone: all its units
dies a                     process `a` has ended
settled a b                `b` says that nothing can come to it any more from `a`, which has died
"""

from __future__ import annotations

from tests.scenarios.script import Command, Scene

from trimesh._routing.channel_accounts import Holders, Share
from trimesh.ids import ProcId


class ChannelScene(Scene):
    """One channel and the processes around it."""

    def __init__(self) -> None:
        self.holders = Holders()
        self.ids: dict[str, ProcId] = {}
        self.dead: set[str] = set()
        self.shares: dict[str, Share] = {}

    def _id(self, name: str) -> ProcId:
        return self.ids.setdefault(name, ProcId(len(self.ids) + 1))

    def _name(self, proc: ProcId) -> str:
        return next(name for name, found in self.ids.items() if found == proc)

    def open(self, command: Command) -> str:
        self.__init__()  # type: ignore[misc]
        home = command.words[0]
        self.holders.begin(self._id(home))
        self._share(home).take()
        return self._state()

    def _share(self, name: str) -> Share:
        return self.shares.setdefault(name, Share())

    def sent(self, command: Command) -> str:
        sender, transit, holder = command.words
        self.holders.sent(self._id(sender), int(transit), self._id(holder), is_gone=holder in self.dead)
        return self._state()

    def took(self, command: Command) -> str:
        sender, transit, holder = command.words
        if not self.holders.taken(self._id(sender), int(transit), self._id(holder), is_gone=sender in self.dead):
            return f"{holder} is told that its port leads nowhere"
        self._share(holder).take()
        return self._state()

    def clones(self, command: Command) -> str:
        share = self._share(command.words[0])
        share.refer()
        return f"{command.words[0]} has {share.references} references, {share.units} units"

    def drops(self, command: Command) -> str:
        name = command.words[0]
        units = int(command.options.get("units", 0)) or self._share(name).release()
        if not units:
            return f"{name} has {self._share(name).references} references left"
        self.holders.dropped(self._id(name), units)
        return self._state()

    def dies(self, command: Command) -> str:
        name = command.words[0]
        self.dead.add(name)
        asked = [self._name(proc) for proc in self.holders.gone(self._id(name))]
        return self._state() + (f"; asks {','.join(asked)} what still came from {name}" if asked else "")

    def settled(self, command: Command) -> str:
        sender, holder = command.words
        self.holders.settled(self._id(sender), self._id(holder))
        return self._state()

    def _state(self) -> str:
        if self.holders.is_over:
            return "over: nobody can send any more"
        held = [f"{self._name(proc)}:{units}" for proc, units in self.holders._units.items()]
        parts = [f"held by {' '.join(held) or 'nobody'}"]
        for what, transits in (("on its way", self.holders._transits), ("came early", self.holders._early)):
            shown = [
                f"{self._name(sender)}>{self._name(holder)}#{transit}" for sender, transit, holder in sorted(transits)
            ]
            parts += [f"{what}: {' '.join(shown)}"] if shown else []
        return "; ".join(parts)
