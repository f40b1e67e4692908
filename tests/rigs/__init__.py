"""What tests of several folders share: services in one process, recorded runs, brokers and endpoints that fail."""
