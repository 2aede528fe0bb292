"""Pipeline schedules as values: tables of steps, their generators and their check.

schedule   every schedule by name: gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-1p, zb-2p, zb-v, v-half, v-min, dualpipe-v
Table      the value: printed, saved, loaded, compared, executed by the runtime, timed by ``lockstep.plan.simulate``
check      is a table valid? messages: who sends what to whom, in which order; told: what must have arrived by then;
           embedding_rows: those of a tied embedding
"""

from lockstep.parallel.schedules.check import check
from lockstep.parallel.schedules.dependencies import Need
from lockstep.parallel.schedules.messages import AHEAD, Message, embedding_rows, messages, told
from lockstep.parallel.schedules.named import NAMES, schedule
from lockstep.parallel.schedules.program import walk
from lockstep.parallel.schedules.table import ScheduleError, Step, Table, load_table, table_from_dict
from lockstep.parallel.schedules.times import StageTimes

__all__ = [
    "AHEAD",
    "NAMES",
    "Message",
    "Need",
    "ScheduleError",
    "StageTimes",
    "Step",
    "Table",
    "check",
    "embedding_rows",
    "load_table",
    "messages",
    "schedule",
    "table_from_dict",
    "told",
    "walk",
]
