//! What runs on the host: the collector and its views, and the VM that the demo and the tests boot.

pub mod vm;
