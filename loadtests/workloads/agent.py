"""An agent that calls tools; what they return are spans; pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from loadtests.fields import Fields
from loadtests.prompts import Message, Piece, Session, ToolCall, Turn
from loadtests.texts import random_for, text
from loadtests.workloads.library import Library
from loadtests.workloads.shared_documents import system_prompt


@dataclass(frozen=True)
class Agent:
    """Sessions of several requests: a task, then a tool's result in every further request.

    Attributes:
        seed: The workload's.
        library: What the tools read: files that many agents look at.
        steps: Least and greatest number of tool calls.
        system_length: Length of the system prompt, which describes the tools, in words.
        task_length: Length of the task in words.
        tool_seconds: Mean of the exponential time that a tool takes.
        tool_calls: Write calls into ``tool_calls`` and results into messages of the role ``tool``; else as text of
            the assistant and the user, for chat templates that know no tools.
        max_tokens: Least and greatest length of an answer.
    """

    seed: int
    library: Library
    steps: tuple[int, int]
    system_length: tuple[int, int]
    task_length: tuple[int, int]
    tool_seconds: float
    tool_calls: bool
    max_tokens: tuple[int, int]

    @classmethod
    def read(cls, fields: Fields, seed: int, max_tokens: tuple[int, int]) -> Agent:
        """From the workload's table."""
        library = Library.read(fields, seed, "file")
        steps = fields.span("steps")
        library.check(steps[1], fields, "steps")
        return cls(
            seed=seed,
            library=library,
            steps=steps,
            system_length=fields.span("system_length", (120, 120)),
            task_length=fields.span("task_length", (30, 30)),
            tool_seconds=fields.number("tool_seconds", 0.0),
            tool_calls=fields.flag("tool_calls", True),
            max_tokens=max_tokens,
        )

    def size(self) -> int | None:
        """It has no end."""
        return None

    def session(self, number: int) -> Session:
        """One task."""
        rng = random_for(self.seed, "agent", number)
        steps = rng.randint(*self.steps)
        task = text(rng.randint(*self.task_length), self.seed, "task", number)
        said = [
            system_prompt(self.seed, 0, self.system_length),
            Message("user", (Piece(task),)),
        ]
        turns = [Turn(tuple(said), rng.randint(*self.max_tokens))]
        for step, file in enumerate(self.library.pick(rng, steps)):
            said += self._call(f"call-{number}-{step}", file)
            pause = rng.expovariate(1.0) * self.tool_seconds
            turns.append(Turn(tuple(said), rng.randint(*self.max_tokens), pause))
        return Session(number, tuple(turns))

    def _call(self, name: str, file: int) -> list[Message]:
        arguments = json.dumps({"path": f"/file/{file}"})
        result = (self.library.document(file),)
        if self.tool_calls:
            return [
                Message("assistant", (Piece(""),), (ToolCall(name, "read", arguments),)),
                Message("tool", result, tool_call_id=name),
            ]
        return [
            Message("assistant", (Piece(f"read {arguments}"),)),
            Message("user", (*result, Piece("Go on."))),
        ]
