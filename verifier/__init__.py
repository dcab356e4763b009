"""What verify.py and rewards.py are built on.

values     what an answer can be, as records
latex      text in, values out
algebra    values compared exactly
pool       worker processes that can be killed
sandbox    programs of unknown intent, run behind a filter of system calls
"""
