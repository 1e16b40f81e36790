"""`spottrain submit`: from a script or a manifest to a job.

script    the TrainingJob of a script
survival  what of a script survives a reclaim, by what it imports
pack      the script's folder as one archive in the store
outline   what a submission will do, before it is done
journey   the steps of a submission
"""
