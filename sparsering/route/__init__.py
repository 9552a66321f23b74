"""The route of a call from a public function to a backend.

options.py checks the options of a call, decision.py decides how calls of its kind run, work.py
builds the `Work` and the `Problem`, and run.py runs it, directly or as an operator (operators.py).
"""
