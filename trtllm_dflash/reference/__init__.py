"""The drafter in plain fp32 torch, written from the formulas: the oracle of every other runner."""
