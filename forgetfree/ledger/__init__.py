"""The ledger: which task owns which parameter, and its value. Task-indexed, append-only.

A task stands on θ_pre or on an earlier task, and is inferred with what that is inferred with and its own record: later
records cannot change it. Where each task stands on the one before it, owned regions are pairwise disjoint, and t_k is inferred
with θ_pre and the union of the records of t_1 … t_k, which is that of the γ_i (paper, §5.2 and C.3).
"""
