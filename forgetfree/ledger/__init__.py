"""The ledger: which task owns which parameter, and its value. Task-indexed, append-only.

A task stands on θ_pre or on an earlier task, its parent. It is inferred with the weights of its parent and its own record, so
later records cannot change it. If each task stands on the one before it, owned regions are pairwise disjoint, and t_k is
inferred with θ_pre and the union of the records of t_1 … t_k, which is the union of the γ_i (paper, §5.2 and C.3).
"""
