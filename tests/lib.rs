//! What the VM tests are made of; see the modules.
