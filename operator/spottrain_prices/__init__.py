"""The price CronJob: asks a cloud what instances cost, and writes it to a ConfigMap that the operator reads.

__main__   settings, one run, exit code
job        one run: what to price, ask the cloud, merge, write
aws        EC2's spot price history and AWS's price list; the only module that knows boto3
azure      Azure's retail prices
cluster    the API server: nodes, and one ConfigMap
history    merges fetched prices with those that were written before. Pure
wanted     which instance types in which regions. Pure
fetched    what a cloud answered: rates, errors, notes
settings, web, log
"""
