"""The planner: the best parallel strategy for hardware that you do not have, computed on a laptop.

schedule, Table, StageTimes   pipeline schedules as values (made in ``lockstep.parallel.schedules``)
balance, BalanceProblem       layers per stage and recompute per stage under the memory of every device
simulate, Simulation          when every step of a table starts and ends, and the memory over time
timeline_html, trace          a simulation as an interactive page, and as a trace for Perfetto; save_timeline writes both
"""

from lockstep.parallel.schedules import StageTimes, Table, schedule
from lockstep.plan.balance import Balance, balance
from lockstep.plan.balance_problem import BalanceProblem
from lockstep.plan.simulate import Simulation, simulate
from lockstep.plan.timeline import save_timeline, timeline_html, trace

__all__ = [
    "Balance",
    "BalanceProblem",
    "Simulation",
    "StageTimes",
    "Table",
    "balance",
    "save_timeline",
    "schedule",
    "simulate",
    "timeline_html",
    "trace",
]
