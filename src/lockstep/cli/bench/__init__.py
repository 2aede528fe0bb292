"""Measure speed, memory and errors; one sub-command for each thing measured, one file for each sub-command."""
