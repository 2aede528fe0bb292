"""Servers under the same load: ours and its peers, each a process with OpenAI's interface."""

from lockstep.bench.serving.compare import compare as compare
from lockstep.bench.serving.load import Load as Load
from lockstep.bench.serving.load import ask as ask
from lockstep.bench.serving.side import SIDES as SIDES
from lockstep.bench.serving.side import Server as Server
from lockstep.bench.serving.side import Side as Side
