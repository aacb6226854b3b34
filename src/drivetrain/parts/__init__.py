"""What strategies are built from: collectives, buckets, norms, stores, the traffic ledger."""
