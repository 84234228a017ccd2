//! Order of a bring-up in virtual time: the model, its best order, and its properties.

mod model;
mod optimum;
mod properties;
