"""What is measured: each bench compares sides within one run and gives a `Report`, a value that can be printed, kept
as JSON and written into a section of a document."""

from lockstep.bench.document import write_section as write_section
from lockstep.bench.machine import Machine as Machine
from lockstep.bench.machine import describe as describe
from lockstep.bench.report import Report as Report
from lockstep.bench.turns import Spread as Spread
from lockstep.bench.turns import take_turns as take_turns
