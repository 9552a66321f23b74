"""The way of a call from a verb to a backend.

options.py checks the options of a call, decision.py decides how its kind runs, work.py makes the
work and the problem, run.py runs it, directly or as an operator (operators.py).
"""
