"""HEAD: the one object that says who trains and what is durable.

document  what it says, and the rules by which it may change
cas       carries a change out by conditional writes
owner     the two of them over a store, for a training
care      what a person may change while none runs
"""
