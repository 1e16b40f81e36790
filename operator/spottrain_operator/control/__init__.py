"""The control loop: observe -> plan -> apply, and what feeds it.

handlers, resync, caches   what the watches and LISTs say
work_queue, reconcile      which job is looked at, when
observe, plan, follow, apply   one look at one job; plan and follow are pure
progress, discovery        polls of trainers, and what the cluster offers
memory                     what is remembered beyond the caches
service                    the parts put together
"""
