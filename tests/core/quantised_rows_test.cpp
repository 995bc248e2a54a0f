#include "core/index/quantised_rows.hpp"

#include <gtest/gtest.h>

#include <vector>

namespace qkv::index {
namespace {

TEST(quantised_rows, each_row_of_each_token_has_one_team) {
  for (const int lanes : {1, 2, 4, 8, 16, 32}) {
    for (const int rows_of_token : {2, 6, 16, 64, 512}) {
      for (const int tokens_held : {1, 2}) {
        const RowTeams teams{lanes, rows_of_token, tokens_held};
        std::vector<int> taken(static_cast<size_t>(teams.tokens_of_turn()) * rows_of_token);
        for (int team = 0; team < teams.num_teams(); ++team) {
          for (int unit = team; unit < teams.units_of_turn(); unit += teams.num_teams()) {
            for (int t = 0; t < tokens_held; ++t) {
              ++taken.at((teams.first_token_of(unit) + t) * rows_of_token + teams.row_of(unit));
            }
          }
        }
        EXPECT_EQ(taken, std::vector<int>(taken.size(), 1)) << lanes << " " << rows_of_token << " " << tokens_held;
      }
    }
  }
}

}  // namespace
}  // namespace qkv::index
