"""From a traced joint graph to two compiled graphs: backend, options, capture, partition, plan files, the command line."""
