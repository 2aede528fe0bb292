"""The planner: the best parallel strategy for hardware that you do not have, computed on a laptop.

search, Plan, load_plan       the best few strategies for a model on a cluster; a plan is a value and a file
predict, Layout, Batch        step time and memory of one strategy
rank_memory                   memory of one rank at every step of its schedule
calibrate, Coefficients       a few measured steps correct the description of a cluster
search_to_run, Found          the same of what this version's trainer runs, and what would be faster beyond it
load_cluster, model_shape     descriptions: devices and links; sizes of models; Cluster of Device and Level, ModelShape
activation_bytes              activation memory in closed form
schedule, Table, StageTimes   pipeline schedules as values of Steps (made in ``lockstep.parallel.schedules``)
balance, BalanceProblem       layers per stage and recompute per stage under the memory of every device; of
                              Layers with ways to Keep them, and an End before and behind them
simulate, Simulation, Event   when every step of a table starts and ends, and the memory over time
search_schedule               a table for uneven stage times under a memory cap
timeline_html, trace          a simulation as a page to pan and zoom, and as a trace for Perfetto; save_timeline
"""

from lockstep.parallel.schedules import StageTimes, Step, Table, schedule
from lockstep.plan.activations import activation_bytes
from lockstep.plan.balance import Balance, balance
from lockstep.plan.balance_problem import BalanceProblem, End, Keep, Layers
from lockstep.plan.calibrate import Measured, calibrate
from lockstep.plan.cluster import Cluster, Device, Level, load_cluster
from lockstep.plan.coefficients import Coefficients
from lockstep.plan.layout import Batch, Layout
from lockstep.plan.named_shape import model_shape
from lockstep.plan.planfile import Plan, check_model, load_plan
from lockstep.plan.predict import Prediction, predict
from lockstep.plan.rank_memory import RankMemory, rank_memory
from lockstep.plan.search import search
from lockstep.plan.search_schedule import search_schedule
from lockstep.plan.shape import ModelShape
from lockstep.plan.simulate import Event, Simulation, simulate
from lockstep.plan.timeline import save_timeline, timeline_html, timeline_text, trace
from lockstep.plan.to_run import Found, search_to_run

__all__ = [
    "Balance",
    "BalanceProblem",
    "Batch",
    "Cluster",
    "Coefficients",
    "Device",
    "End",
    "Event",
    "Found",
    "Keep",
    "Layers",
    "Layout",
    "Level",
    "Measured",
    "ModelShape",
    "Plan",
    "Prediction",
    "RankMemory",
    "Simulation",
    "StageTimes",
    "Step",
    "Table",
    "activation_bytes",
    "balance",
    "calibrate",
    "check_model",
    "load_cluster",
    "load_plan",
    "model_shape",
    "predict",
    "rank_memory",
    "save_timeline",
    "schedule",
    "search",
    "search_schedule",
    "search_to_run",
    "simulate",
    "timeline_html",
    "timeline_text",
    "trace",
]
