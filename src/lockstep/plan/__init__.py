"""The planner: the best parallel strategy for hardware that you do not have, computed on a laptop.

schedule, Table, StageTimes   pipeline schedules as values (made in ``lockstep.parallel.schedules``)
simulate, Simulation          when every step of a table starts and ends, and the memory over time
"""

from lockstep.parallel.schedules import StageTimes, Table, schedule
from lockstep.plan.simulate import Simulation, simulate

__all__ = ["Simulation", "StageTimes", "Table", "schedule", "simulate"]
