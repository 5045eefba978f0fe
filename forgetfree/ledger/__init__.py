"""The ledger: which task owns which parameter, and its value. Task-indexed, append-only.

In a ledger of unions, owned regions are pairwise disjoint and their union is the union of the γ_i (paper, §5.2 and
C.3). Task t_k is inferred with θ_pre and the union of the records of t_1 … t_k: later records cannot change it. The
other compositions use fewer of these records, and never later ones.
"""
