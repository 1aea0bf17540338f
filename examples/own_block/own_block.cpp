// A program that has all of Regather's commands for a model of one's own.
#include "launcher/regather.h"
#include "own_model.h"

int main(int argc, char** argv) {
  regather::ModelRegistry models = regather::built_in_models();
  models.push_back({.name = "own", .make = own::make_own});
  return regather::main(argc, argv, models);
}
